"""What the codecs ask of arrays, and how they share them out to threads."""

from typing import Callable, List, Sequence, Tuple

import numpy as np

from hvd_fec import threads, wire

VALUES_PER_THREAD = 1 << 17
"""A thread is not worth waking for fewer."""


def gradient(x) -> Tuple[np.ndarray, int, int]:
    """Bytes, dtype code and number of elements of ``x``.

    Raises:
        TypeError: it is no array of a dtype that can be encoded.
    """
    x = np.asarray(x)
    if x.dtype.name not in wire.DTYPES or not x.dtype.isnative:
        raise TypeError(f"a gradient is of {' or '.join(wire.DTYPES)}, not {x.dtype}")
    raw = np.require(x, requirements=["C", "A"]).reshape(-1).view(np.uint8)
    return raw, wire.DTYPES[x.dtype.name], x.size


def checked(name: str, array: np.ndarray, size: int) -> np.ndarray:
    """``array`` flat, if it is a writeable C-contiguous float32 array of ``size`` elements.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        found = getattr(array, "dtype", type(array))
        raise ValueError(f"{name} must be a float32 array, not {found}")
    if not array.flags.carray:
        raise ValueError(f"{name} must be C-contiguous, aligned and writeable")
    if array.size != size:
        raise ValueError(f"{name} has {array.size} elements, {size} are needed")
    return array.reshape(-1)


def each(calls: Sequence[Callable[[], object]], sizes: Sequence[int]) -> list:
    """Results of ``calls``, each of which works on a tensor of so many elements.

    Tensors that ``ranges`` cuts up follow one another and have all threads each; the others are
    dealt out to the threads, so that a model of many small tensors keeps them busy too.
    """
    results = [None] * len(calls)
    small = [i for i, size in enumerate(sizes) if size < 2 * VALUES_PER_THREAD]
    workers = min(threads.num_threads(), sum(sizes[i] for i in small) // VALUES_PER_THREAD) or 1
    if workers == 1:
        return [call() for call in calls]
    for i in set(range(len(calls))).difference(small):
        results[i] = calls[i]()
    queue = iter(small)  # next() on it is one step under the GIL

    def work():
        for i in queue:
            results[i] = calls[i]()

    threads.run([work] * workers)
    return results


def ranges(n: int, block: int) -> List[Tuple[int, int]]:
    """Cut n elements into one range per thread, at multiples of ``block``."""
    parts = min(threads.num_threads(), n // VALUES_PER_THREAD) or 1
    blocks = -(-n // block)
    cuts = [min(n, blocks * i // parts * block) for i in range(parts + 1)]
    return list(zip(cuts, cuts[1:]))
