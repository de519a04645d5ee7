"""Ternary values that Horovod's ring can add: digits of base 2n+1 in 64-bit words.

A sum of n values in {-1, 0, 1} has 2n+1 outcomes. So as many base-(2n+1) digits as fit share a
word, and adding words adds all digits at once, without carries. Digits are signed; a rank that
sends zeros takes part in no sum. ``docs/wire-format.md`` has the layout.
"""

import math
from functools import partial
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import ArrayLike

from hvd_fec import threads
from hvd_fec.codecs._numpy import digits_of
from hvd_fec.codecs.arrays import checked, gradient, ranges
from hvd_fec.codecs.kernels import active as kernels
from hvd_fec.wire import PayloadError

CHUNK = kernels.CHUNK


def gathers(ranks: int) -> bool:
    """Whether an allgather of the 1.6-bit form moves fewer bytes than a ring over the sums.

    Per value, a rank sends (n-1) * 8/40 bytes to gather words of 40 base-3 digits, and
    2 * (n-1)/n * 8/d bytes to add up words of d base-(2n+1) digits in a ring. So gathering is the
    better way for 2 and 3 ranks; at 4 the two are equal, and one sum is decoded faster than four.
    """
    return ranks * digits_of(ranks)[1] < 2 * digits_of(1)[1]


class Survey(NamedTuple):
    """What a scale is chosen from: the largest magnitude and the root of the mean square, both
    representable in float32. ``peak`` is infinite or NaN if any value is."""

    peak: float
    rms: float


def survey(x: ArrayLike, residual: Optional[np.ndarray] = None) -> Survey:
    """Look through ``x + residual``.

    Args:
        x: float16, bfloat16, float32 or float64 array of any shape.
        residual: float32, C-contiguous, as many elements as ``x``.

    The result does not depend on the instruction set or the number of threads.

    Raises:
        TypeError: another dtype.
        ValueError: a residual of another size, dtype or layout.
    """
    raw, dtype, n = gradient(x)
    residual = None if residual is None else checked("residual", residual, n)
    squares = np.zeros(-(-n // CHUNK))
    itemsize = raw.size // n if n else 0

    def look(a, b):
        return kernels.ternary_survey(
            raw[a * itemsize : b * itemsize],
            dtype,
            None if residual is None else residual[a:b],
            squares[a // CHUNK : -(-b // CHUNK)],
        )

    peaks = threads.run([partial(look, a, b) for a, b in ranges(n, CHUNK)])
    peak = np.array([max(peaks)], np.uint32).view(np.float32)[0]
    if not np.isfinite(peak):
        return Survey(float(peak), math.nan)
    return Survey(float(peak), float(np.float32(math.sqrt(math.fsum(squares) / max(n, 1)))))


class TernaryCodec:
    """Pack ternary values for a sum over ``ranks`` ranks, and read the sum.

    Args:
        ranks: how many words are added up before they are decoded, 1..16383.

    Raises:
        ValueError: ``ranks`` is out of range.
    """

    def __init__(self, ranks: int) -> None:
        if not 1 <= ranks <= kernels.MAX_RANKS:
            raise ValueError(f"{ranks} ranks are outside 1..{kernels.MAX_RANKS}")
        self.ranks = int(ranks)
        self.base, self.digits = digits_of(self.ranks)

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {"ranks": self.ranks}

    def __repr__(self) -> str:
        return f"TernaryCodec(ranks={self.ranks})"

    def words(self, count: int) -> int:
        """Words for ``count`` values."""
        return -(-count // self.digits)

    def encode(
        self,
        x: ArrayLike,
        step: float,
        level: float,
        words: np.ndarray,
        residual: Optional[np.ndarray] = None,
    ) -> int:
        """Pack t = sign(v) where ``|v| >= level``, v = x + residual, and keep v - t * step.

        Args:
            x: float16, bfloat16, float32 or float64 array of any shape, all of it finite
                (``survey`` says whether it is).
            step: the value that t = 1 stands for.
            level: the smallest magnitude that is sent; infinity for none.
            words: int64, C-contiguous, ``self.words(x.size)`` elements: overwritten.
            residual: float32, C-contiguous, as many elements as ``x``: updated in place.

        Returns:
            How many t are not zero.

        Raises:
            TypeError: another dtype.
            ValueError: words or a residual that do not fit, or a residual that shares memory.
        """
        raw, dtype, n = gradient(x)
        if residual is not None:
            residual = checked("residual", residual, n)
            if np.may_share_memory(residual, raw):
                raise ValueError("x and residual share memory")

        def encode(part, a, b, words):
            rest = None if residual is None else residual[a:b]
            return kernels.ternary_encode(part, dtype, rest, step, level, self.ranks, words)

        return self._pack(encode, raw, n, words)

    def draw(self, x: ArrayLike, step: float, key: int, words: np.ndarray) -> int:
        """Pack t = sign(x) with probability ``|x| / step``, at most 1: t * step has mean ``x``.

        ``key`` is a 64-bit number: the same draws for the same key, whatever the instruction set
        or the number of threads. Probabilities are multiples of 2**-24. Otherwise as ``encode``.
        """
        raw, dtype, n = gradient(x)

        def draw(part, a, b, words):
            return kernels.ternary_draw(part, dtype, step, a & 0xFFFFFFFF, key, self.ranks, words)

        return self._pack(draw, raw, n, words)

    def _pack(self, kernel, raw, n, words) -> int:
        if words.dtype != np.int64 or words.shape != (self.words(n),) or not words.flags.carray:
            raise ValueError(f"{n} values need {self.words(n)} words of int64, not {words.shape}")
        itemsize = raw.size // n if n else 0
        calls = [
            partial(
                kernel, raw[a * itemsize : b * itemsize], a, b,
                words[a // self.digits : -(-b // self.digits)],
            )
            for a, b in ranges(n, self._block)
        ]  # fmt: skip
        return sum(threads.run(calls))

    @property
    def _block(self) -> int:
        return self.digits * kernels.LANES

    def decode(self, parts: np.ndarray, scale: float, out: np.ndarray) -> None:
        """``out`` = scale * t, summed over the rows of ``parts``.

        Args:
            parts: int64 of shape (rows, ``self.words(out.size)``); each row is a sum of what at
                most ``ranks`` ranks packed. Rows are contiguous.
            out: float32, C-contiguous: overwritten.

        Raises:
            PayloadError: a row is no such sum; ``out`` is then meaningless.
            ValueError: shapes that do not fit.
        """
        out = checked("out", out, out.size)
        if parts.dtype != np.int64 or parts.shape[1:] != (self.words(out.size),):
            raise ValueError(
                f"{out.size} values need {self.words(out.size)} words of int64, not "
                f"{parts.shape} of {parts.dtype}"
            )

        def decode(a, b):
            words = parts[:, a // self.digits : -(-b // self.digits)]
            return kernels.ternary_decode(words, self.ranks, scale, out[a:b])

        calls = [partial(decode, a, b) for a, b in ranges(out.size, self._block)]
        status = max(threads.run(calls))
        if status:
            raise PayloadError(
                f"{parts.shape[1]} words for {out.size} values of {self.ranks} ranks hold "
                + ("a digit after the last value" if status == 2 else "a sum that is out of range")
            )
