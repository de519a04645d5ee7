"""What the codecs ask of arrays, and how they share them out to threads."""

from functools import lru_cache
from typing import Any, Callable, List, Sequence, Tuple

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
    code = _dtype_code(x.dtype)
    raw = np.require(x, requirements=["C", "A"]).reshape(-1).view(np.uint8)
    return raw, code, x.size


@lru_cache(maxsize=None)  # NumPy makes a dtype's name anew each time
def _dtype_code(dtype) -> int:
    if dtype.name not in wire.DTYPES or not dtype.isnative:
        raise TypeError(f"a gradient is of {' or '.join(wire.DTYPES)}, not {dtype}")
    return wire.DTYPES[dtype.name]


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

    Tensors are dealt out to the threads, the largest first. One that is more than a thread's fair
    share is cut up by ``ranges`` instead; the smallest stay in this thread, since their calls are
    mostly Python, in which threads only wait for one another.
    """
    count = threads.num_threads()
    share = sum(sizes) / count
    dealt = [i for i, size in enumerate(sizes) if VALUES_PER_THREAD <= 2 * size <= 2 * share]
    if count < 2 or len(dealt) < 2:
        return [call() for call in calls]
    dealt.sort(key=lambda i: -sizes[i])
    results: List[Any] = [None] * len(calls)
    for i in set(range(len(calls))).difference(dealt):
        results[i] = calls[i]()
    queue = iter(dealt)  # next() on it is one step under the GIL

    def work():
        with threads.alone():
            for i in queue:
                results[i] = calls[i]()

    threads.run([work] * min(count, len(dealt)))
    return results


def ranges(n: int, block: int) -> List[Tuple[int, int]]:
    """Cut n elements into one range per thread, at multiples of ``block``."""
    parts = max(1, n // VALUES_PER_THREAD)
    if parts > 1:
        parts = min(parts, threads.num_threads())
    blocks = -(-n // block)
    cuts = [min(n, blocks * i // parts * block) for i in range(parts + 1)]
    return list(zip(cuts, cuts[1:]))
