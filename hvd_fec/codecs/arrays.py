"""What the codecs ask of arrays, and how they share them out to threads."""

from typing import List, Tuple

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


def ranges(n: int, block: int) -> List[Tuple[int, int]]:
    """Cut n elements into one range per thread, at multiples of ``block``."""
    parts = min(threads.num_threads(), n // VALUES_PER_THREAD) or 1
    blocks = -(-n // block)
    cuts = [min(n, blocks * i // parts * block) for i in range(parts + 1)]
    return list(zip(cuts, cuts[1:]))
