"""FEC, fixed-exponential compression: 5-bit quantisation above an exponent threshold.

The scheme is that of "Research on Data Extraction and Communication Optimization for Distributed
Deep Learning": values whose exponent reaches a threshold are kept, each as a sign bit and a 4-bit
exponent code in planes of their own, and runs of zeros are squeezed out of both planes.
"""

import math
from functools import partial
from numbers import Real
from typing import List, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike

from hvd_fec import threads, wire
from hvd_fec.codecs import coded
from hvd_fec.codecs.arrays import checked, gradient, ranges
from hvd_fec.codecs.kernels import active as kernels
from hvd_fec.wire import BytesLike, PayloadError

CODEC = 1
"""This format's number in the header."""
CHUNK = kernels.CHUNK
FORMS = ("planes", "coded")
"""What a payload's bytes may look like; the header has the index."""

_FAULTS = {
    1: "a code stream longer than its plane",
    2: "a code stream that runs past its plane",
    3: "a code stream with a zero literal or a run at its end",
    4: "a code for an element that does not exist",
    5: "a sign stream longer than its plane",
    6: "a sign stream that runs past its plane",
    7: "a sign stream with a zero literal or a run at its end",
    8: "a sign for a value that was not kept",
    9: "stream lengths that do not add up to the sections",
}


class FecCodec:
    """Encode gradients to FEC payloads and back.

    A value v is kept when |v| >= 2**threshold. Code c = 1..15 stands for the octave that starts at
    2**(threshold + c - 1), larger values take code 15, and a kept value decodes to 4/3 of its
    octave's start: the choice with the smallest worst relative error (one third), whatever the
    distribution of the values.

    Args:
        threshold: exponent of the smallest kept magnitude, a number in -126..113: an integer in
            the published scheme. ``2**threshold`` is rounded to float32.
        form: ``"planes"``, the quickest to write and to read, or ``"coded"``, the same values near
            their entropy: smaller, the more so the sparser, and more work per kept value. A tensor
            whose planes are not larger is sent as planes all the same.

    Raises:
        ValueError: the threshold is not such a number, or the form has another name.
    """

    def __init__(self, threshold: float = -9, form: str = "planes") -> None:
        number = isinstance(threshold, Real) and not isinstance(threshold, bool)
        if not number or not math.isfinite(threshold):
            raise ValueError(f"threshold must be a number, not {threshold!r}")
        if not -126 <= threshold <= 113:
            raise ValueError(
                f"threshold {threshold} is outside -126..113, where every octave fits float32"
            )
        self.threshold = int(threshold) if threshold == int(threshold) else float(threshold)
        self._lowest = np.float32(2.0**self.threshold)
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
        self.form = form

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {"threshold": self.threshold, "form": self.form}

    def __repr__(self) -> str:
        return f"FecCodec(threshold={self.threshold}, form={self.form!r})"

    def encode(self, x: ArrayLike, residual: Optional[np.ndarray] = None) -> np.ndarray:
        """Encode ``x`` (plus ``residual``) and leave in ``residual`` what the payload lacks.

        Args:
            x: float16, bfloat16, float32 or float64 array of any shape.
            residual: float32, C-contiguous, as many elements as ``x``; updated in place so that
                decoded + new residual = x + old residual up to one float32 rounding.

        Returns:
            The payload, uint8 of shape (bytes,). It does not record the shape of ``x``.

        If an element of ``x`` is NaN, infinite or too large for float32, the payload marks it (it
        decodes to NaN), the others are encoded without the residual, and the residual is left
        untouched: a training loop that skips such a step has lost nothing.

        Raises:
            TypeError: another dtype.
            ValueError: a residual of another size, dtype or layout, or sharing memory with ``x``.
        """
        return self.encode_counting(x, residual)[0]

    def encode_counting(
        self, x: ArrayLike, residual: Optional[np.ndarray] = None
    ) -> Tuple[np.ndarray, int]:
        """As :meth:`encode`; also counts the values from ``2**threshold`` plus a quarter of its
        power of two up. With the number of kept values, which the header has, that tells how
        their number changes with the threshold."""
        raw, dtype, n = gradient(x)
        if residual is not None:
            residual = checked("residual", residual, n)
            if np.may_share_memory(residual, raw):
                raise ValueError("x and residual share memory")
        if _finite(raw, dtype, n):
            return self._encode(raw, dtype, n, residual)
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(x).reshape(-1).astype(np.float32)
        bad = ~np.isfinite(values)
        values[bad] = 0
        return self._encode(values.view(np.uint8), dtype, n, None, bad)

    def is_finite(self, x: ArrayLike) -> bool:
        """Whether all elements of ``x``, as for :meth:`encode`, are finite and fit float32."""
        return _finite(*gradient(x))

    def _encode(self, raw, dtype, n, residual, bad=None) -> Tuple[np.ndarray, int]:
        itemsize = raw.size // n if n else 0
        # NaNs are taken out of a float32 copy; the header still names the caller's dtype.
        kernel_dtype = dtype if bad is None else wire.DTYPES["float32"]
        n_chunks = -(-n // CHUNK)
        # Worst case; only the pages that are written become memory.
        codes = np.empty((n + 1) // 2, np.uint8)
        signs = np.empty(n // 8 + n_chunks, np.uint8)
        table = np.empty(2 * n_chunks, "<u2")
        cuts = ranges(n, coded.CHUNK if self.form == "coded" else CHUNK)

        def encode(a, b):
            chunk = a // CHUNK
            return kernels.fec_encode(
                raw[a * itemsize : b * itemsize],
                kernel_dtype,
                None if residual is None else residual[a:b],
                self._lowest,
                codes[a // 2 :],
                signs[a // 8 + chunk :],
                table[2 * chunk :],
            )

        sizes = threads.run([partial(encode, a, b) for a, b in cuts])
        parts = [table.view(np.uint8)]
        parts += [codes[a // 2 : a // 2 + size[0]] for (a, _), size in zip(cuts, sizes)]
        code_section = sum(part.size for part in parts)
        parts += [
            signs[a // 8 + a // CHUNK : a // 8 + a // CHUNK + size[1]]
            for (a, _), size in zip(cuts, sizes)
        ]
        sign_section = sum(part.size for part in parts) - code_section
        form = "planes"
        if self.form == "coded":
            chunks = [2 * (a // CHUNK) for a, _ in cuts]
            smaller = coded.pack(
                cuts,
                parts[1 : 1 + len(cuts)],
                parts[1 + len(cuts) :],
                [table[i:j] for i, j in zip(chunks, [*chunks[1:], table.size])],
                [size[2] for size in sizes],
            )
            if sum(part.size for part in smaller) < code_section + sign_section:
                form, parts = "coded", smaller
                code_section, sign_section = sum(part.size for part in parts), 0
        nonfinite = np.empty(0, np.uint8)
        if bad is not None:
            plane = np.packbits(bad, bitorder="little")
            nonfinite = np.empty_like(plane)
            used = kernels.pack_runs(plane, nonfinite)
            nonfinite = plane if used == plane.size else nonfinite[:used]
        exponent, mantissa = divmod(int(self._lowest.view(np.uint32)), 1 << 23)
        header = wire.Header(
            CODEC,
            dtype,
            0 if bad is None else wire.NONFINITE,
            exponent - 127,
            n,
            sum(size[2] for size in sizes),
            (code_section, sign_section, nonfinite.size),
            mantissa,
            FORMS.index(form),
        )
        payload = np.empty(header.nbytes, np.uint8)
        header.write(payload)
        np.concatenate([*parts, nonfinite], out=payload[wire.HEADER.size :])
        return payload, sum(size[3] for size in sizes)

    def decode(self, payload: BytesLike) -> np.ndarray:
        """The payload's values, float32 of shape (count,), whatever threshold wrote it.

        Raises:
            PayloadError: the bytes are not one whole FEC payload.
        """
        sections = _Sections(payload)
        out = np.zeros(sections.header.count, np.float32)
        sections.add_to(out, 1.0)
        return out

    def decode_add(self, payload: BytesLike, out: np.ndarray, scale: float = 1.0) -> None:
        """Add ``scale`` times the payload's values into ``out``, touching only kept elements.

        Args:
            out: float32, C-contiguous, as many elements as were encoded.

        Raises:
            PayloadError: the bytes are not one whole FEC payload; ``out`` is unchanged.
            ValueError: ``out`` does not fit the payload.
        """
        sections = _Sections(payload)
        out = checked("out", out, sections.header.count)
        if np.may_share_memory(out, sections.data):
            raise ValueError("payload and out share memory")
        sections.add_to(out, scale)


class _Sections:
    """The parts of a payload, proven sound before anything is done with them."""

    def __init__(self, payload):
        self.data = data = wire.as_bytes(payload)
        self.header = header = wire.read_header(data)
        if header.codec != CODEC:
            raise PayloadError(f"payload has codec {header.codec}, FEC is {CODEC}")
        if header.nbytes != data.size:
            raise PayloadError(
                f"payload of {header.nbytes} bytes, followed by {data.size - header.nbytes}"
            )
        lowest = (header.parameter + 127 << 23) + header.mantissa
        if not 1 << 23 <= lowest <= 240 << 23:
            raise PayloadError(f"payload has threshold {header.parameter}, outside -126..113")
        self.lowest = np.array(lowest, np.uint32).view(np.float32)[()]
        if header.flags != (wire.NONFINITE if header.sections[2] else 0):
            raise PayloadError(
                f"payload has flags {header.flags} and a non-finite plane of "
                f"{header.sections[2]} bytes"
            )
        if header.form >= len(FORMS):
            raise PayloadError(f"payload has form {header.form}, known are 0 to {len(FORMS) - 1}")
        code_section, sign_section, nonfinite = np.split(
            data[wire.HEADER.size :], np.cumsum(header.sections[:2])
        )
        self.coded = None
        if FORMS[header.form] == "coded":
            self.coded = coded.Streams(header, code_section)
        else:
            self._read_planes(code_section, sign_section)
        self.nonfinite = self._nonfinite(nonfinite) if nonfinite.size else None

    def _read_planes(self, code_section, sign_section) -> None:
        header = self.header
        n_chunks = -(-header.count // CHUNK)
        table_bytes = 4 * n_chunks
        if table_bytes > header.sections[0]:
            raise PayloadError(
                f"payload of {header.count} elements needs a chunk table of {table_bytes} bytes, "
                f"its code section has {header.sections[0]}"
            )
        table = code_section[:table_bytes].copy().view("<u2")
        codes = code_section[table_bytes:]
        self.parts: List[Tuple[int, int, np.ndarray, np.ndarray, np.ndarray]] = []
        lengths = table.reshape(-1, 2).sum(axis=0, dtype=np.uint64) if n_chunks else [0, 0]
        if int(lengths[0]) != codes.size or int(lengths[1]) != sign_section.size:
            raise PayloadError(
                f"chunk table adds up to {lengths[0]} + {lengths[1]} bytes, the sections have "
                f"{codes.size} + {sign_section.size}"
            )
        for a, b in ranges(header.count, CHUNK):
            part = table[2 * (a // CHUNK) : 2 * -(-b // CHUNK)]
            code_len, sign_len = (int(v) for v in part.reshape(-1, 2).sum(axis=0, dtype=np.uint64))
            self.parts.append((a, b, codes[:code_len], sign_section[:sign_len], part))
            codes, sign_section = codes[code_len:], sign_section[sign_len:]
        checks = threads.run(
            [partial(kernels.fec_check, c, s, t, b - a) for a, b, c, s, t in self.parts]
        )
        for (a, *_), (status, chunk, _) in zip(self.parts, checks):
            if status:
                raise PayloadError(
                    f"chunk {a // CHUNK + chunk} of {n_chunks} has {_FAULTS[status]}"
                )
        kept = sum(check[2] for check in checks)
        if kept != header.kept:
            raise PayloadError(f"payload claims {header.kept} kept values and holds {kept}")

    def _nonfinite(self, stream) -> np.ndarray:
        """Indices of the elements that decode to NaN."""
        size = -(-self.header.count // 8)
        plane = stream
        if stream.size < size:
            plane = np.empty(size, np.uint8)
            if kernels.unpack_runs(stream, plane):
                raise PayloadError(f"non-finite plane of {stream.size} bytes is malformed")
        bits = np.unpackbits(plane, bitorder="little")
        if stream.size > size or bits[self.header.count :].any():
            raise PayloadError(f"non-finite plane is longer than {self.header.count} elements")
        return np.flatnonzero(bits)

    def add_to(self, out: np.ndarray, scale: float) -> None:
        if self.coded is not None:
            self.coded.add_to(out, self.lowest, scale)
        else:
            threads.run(
                [
                    partial(kernels.fec_decode_add, c, s, t, self.lowest, scale, out[a:b])
                    for a, b, c, s, t in self.parts
                ]
            )
        if self.nonfinite is not None:
            out[self.nonfinite] = np.nan


def _finite(raw: np.ndarray, dtype: int, n: int) -> bool:
    itemsize = raw.size // n if n else 0
    calls = [
        partial(kernels.all_finite, raw[a * itemsize : b * itemsize], dtype)
        for a, b in ranges(n, CHUNK)
    ]
    return all(threads.run(calls))
