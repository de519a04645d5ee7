"""What the ranks tell each other before their ternary values are added up.

A table of int64, one row per rank of the process set, that travels as a sum: every rank fills its
own row and leaves the others zero, so the sum has all of them. A sum, unlike an allgather, still
works when a rank has called ``hvd.join``; the row of such a rank is zero. ``docs/wire-format.md``
has the layout.
"""

import hashlib
from typing import List, NamedTuple, Sequence

import numpy as np

from hvd_fec.codecs.ternary import Survey
from hvd_fec.wire import PayloadError

VERSION = 1
_FAILED = -1


class Table(NamedTuple):
    """What all ranks said. The same on every rank."""

    ranks: int
    """Size of the process set."""
    present: List[int]
    """The ranks that take part in this exchange, in order."""
    probe: float
    """Mean of their probes (see ``exchange.py``)."""
    surveys: List[Survey]
    """By tensor, over all present ranks: the largest peak, the root of the mean square."""

    @property
    def complete(self) -> bool:
        """Whether every rank takes part."""
        return len(self.present) == self.ranks


def fingerprint(settings: dict, shapes: Sequence[tuple]) -> int:
    """A number in 1..2**61 that differs, in all likelihood, where ranks would not understand each
    other: other settings, or other tensors."""
    text = repr((VERSION, sorted(settings.items()), list(shapes)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**61 + 1


def row(rank: int, ranks: int, mark: int, probe: int, surveys: Sequence[Survey]) -> np.ndarray:
    """This rank's part of the table, int64 of shape (ranks * (1 + tensors),). ``mark`` is its
    fingerprint."""
    table = np.zeros((ranks, 1 + len(surveys)), np.int64)
    table[rank, 0] = mark << 1 | probe
    table[rank, 1:] = np.array(surveys, np.float32).reshape(-1, 2).view(np.int64).reshape(-1)
    return table.reshape(-1)


def failed_row(rank: int, ranks: int, tensors: int) -> np.ndarray:
    """The part of a rank that cannot take part and has to say so."""
    table = np.zeros((ranks, 1 + tensors), np.int64)
    table[rank, 0] = _FAILED
    return table.reshape(-1)


def read(table: np.ndarray, ranks: int, tensors: int) -> Table:
    """The sum of all rows.

    Raises:
        PayloadError: no such table.
        RuntimeError: a rank failed, or ranks differ in their settings or tensors.
    """
    table = np.asarray(table)
    if table.dtype != np.int64 or table.shape != (ranks * (1 + tensors),):
        raise PayloadError(
            f"survey of shape {table.shape} and type {table.dtype}, {ranks} ranks of {tensors} "
            f"tensors make int64 of shape ({ranks * (1 + tensors)},)"
        )
    table = table.reshape(ranks, 1 + tensors)
    heads = table[:, 0]
    failed = np.flatnonzero(heads == _FAILED).tolist()
    if failed:
        raise RuntimeError(f"the compressor failed on rank {failed}: the error is in their output")
    present = np.flatnonzero(heads).tolist()
    if not present or (heads < 0).any():
        raise PayloadError(f"survey with the heads {heads.tolist()}")
    first = present[0]
    for rank in present[1:]:
        if heads[rank] >> 1 != heads[first] >> 1:
            raise RuntimeError(
                f"ranks {first} and {rank} cannot add up their gradients: they have compressors "
                "with different settings or versions, or reduce different tensors"
            )
    # (row, tensor, peak and rms)
    values = np.ascontiguousarray(table[present, 1:]).view(np.float32)
    with np.errstate(all="ignore"):
        values = values.reshape(len(present), tensors, 2).astype(np.float64)
        squares = np.zeros(tensors)
        for rms in values[..., 1]:  # in rank order, for the same bits on all ranks
            squares += rms * rms
        rms = np.sqrt(squares / len(present))
        peaks = values[..., 0].max(axis=0)
    surveys = [Survey(*pair) for pair in zip(peaks.tolist(), rms.tolist())]
    return Table(ranks, present, float((heads[present] & 1).mean()), surveys)
