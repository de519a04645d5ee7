"""The header that every payload starts with, and the error for bytes that are not a payload.

``docs/wire-format.md`` describes the bytes; this module and the codecs are its implementation.
"""

import struct
from typing import Iterator, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

MAGIC = b"HFEC"
VERSION = 1
HEADER = struct.Struct("<4sBBBBhBxIQQQQQ")
NONFINITE = 1
"""Flag: the payload ends with a plane that marks elements which were NaN or infinite."""

DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
"""Gradient dtypes and their codes."""
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}

BytesLike = Union[bytes, bytearray, memoryview, np.ndarray]
"""What bytes are read from; an array must be of uint8."""


class PayloadError(ValueError):
    """Bytes that no encoder of this package writes. The message has the offending numbers."""


class Header(NamedTuple):
    """What a payload says about itself. ``sections`` are byte lengths, in payload order, and
    ``mantissa`` the fraction field of the float32 whose exponent is ``parameter``. ``form`` is how
    the codec has laid them out."""

    codec: int
    dtype: int
    flags: int
    parameter: int
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    kept: int
    sections: Tuple[int, int, int]
    mantissa: int = 0
    form: int = 0

    @property
    def nbytes(self) -> int:
        """Length of the whole payload in bytes, header included."""
        return HEADER.size + sum(self.sections)

    def write(self, payload: np.ndarray) -> None:
        """Put the header into the first bytes of ``payload`` (uint8)."""
        HEADER.pack_into(
            payload.data, 0, MAGIC, VERSION, self.codec, self.dtype, self.flags, self.parameter,
            self.form, self.mantissa, self.count, self.kept, *self.sections,
        )  # fmt: skip


def as_bytes(payload: BytesLike) -> np.ndarray:
    """``payload`` (bytes-like or uint8 array) as a flat uint8 array, without a copy if possible.

    Raises:
        TypeError: not bytes-like and not a uint8 array.
    """
    if not isinstance(payload, np.ndarray):
        return np.frombuffer(payload, np.uint8)
    if payload.dtype != np.uint8:
        raise TypeError(f"a payload is bytes or a uint8 array, not an array of {payload.dtype}")
    return np.ascontiguousarray(payload).reshape(-1)


def read_header(data: np.ndarray) -> Header:
    """Parse the header at the start of ``data`` (uint8); more bytes may follow the payload.

    Raises:
        PayloadError: the bytes are not a header, or ``data`` ends before the payload does.
    """
    if data.size < HEADER.size:
        raise PayloadError(
            f"payload of {data.size} bytes is shorter than its {HEADER.size} byte header"
        )
    fields = HEADER.unpack_from(data.data)
    magic, version, codec, dtype, flags, parameter, form, mantissa, count, kept, *sections = fields
    if magic != MAGIC:
        raise PayloadError(f"payload of {data.size} bytes starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise PayloadError(
            f"payload has format version {version}, this hvd_fec reads version {VERSION}: "
            "install the same hvd_fec on every rank"
        )
    if data[11]:
        raise PayloadError(f"header byte 11 is reserved and {data[11]}, not zero")
    if mantissa >> 23:
        raise PayloadError(f"payload has a threshold with mantissa {mantissa}, more than 23 bits")
    if dtype not in DTYPE_NAMES:
        raise PayloadError(f"payload has dtype code {dtype}, known are {sorted(DTYPE_NAMES)}")
    if kept > count:
        raise PayloadError(f"payload claims {kept} kept values of {count}")
    header = Header(codec, dtype, flags, parameter, count, kept, tuple(sections), mantissa, form)
    if header.nbytes > data.size:
        raise PayloadError(f"payload claims {header.nbytes} bytes, {data.size} are there")
    return header


def split(data: BytesLike) -> Iterator[np.ndarray]:
    """Yield the payloads of a concatenation, as uint8 views of ``data``.

    Raises:
        PayloadError: anything but whole payloads.
    """
    data = as_bytes(data)
    while data.size:
        nbytes = read_header(data).nbytes
        yield data[:nbytes]
        data = data[nbytes:]


# ---- frames: what one rank hands to one exchange ----------------------------------------------

FRAME_MAGIC = b"HFEX"
FRAME_HEADER = struct.Struct("<4sBBBxIQQ")
_PAYLOADS, _ERROR = 0, 1


class Frame(NamedTuple):
    """One rank's part of an exchange: its payloads and its probe (see ``exchange.py``)."""

    probe: int
    payloads: List[np.ndarray]


def frame_size(used: int) -> int:
    """Bytes to send for a frame with ``used`` bytes in it.

    Rounded up to a multiple of a sixteenth of its power of two: Horovod negotiates a collective
    anew whenever its shape changes, so sizes that stay the same for many steps are worth a few
    per cent of padding.
    """
    step = 1 << max(6, used.bit_length() - 5)
    return -(-used // step) * step


def pack_frame(probe: int, payloads: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate ``payloads`` behind a frame header, zero-padded to ``frame_size``."""
    return _frame(_PAYLOADS, probe, len(payloads), payloads)


def pack_error(message: str) -> np.ndarray:
    """A frame that tells every rank why this one has no payloads to send."""
    return _frame(_ERROR, 0, 0, [np.frombuffer(message.encode(), np.uint8)])


def _frame(kind, probe, count, parts) -> np.ndarray:
    used = FRAME_HEADER.size + sum(part.size for part in parts)
    total = frame_size(used)
    frame = np.empty(total, np.uint8)
    FRAME_HEADER.pack_into(frame.data, 0, FRAME_MAGIC, VERSION, kind, probe, count, used, total)
    np.concatenate([*parts, np.zeros(total - used, np.uint8)], out=frame[FRAME_HEADER.size :])
    return frame


def split_frames(data: BytesLike) -> List[Frame]:
    """The frames of a concatenation, in order.

    Raises:
        PayloadError: the bytes are not whole frames of whole payloads.
        RuntimeError: a rank sent an error instead of its payloads; the message says which and why.
    """
    data = as_bytes(data)
    frames: List[Frame] = []
    while data.size:
        if data.size < FRAME_HEADER.size:
            raise PayloadError(f"{data.size} bytes left after frame {len(frames)}, too few for one")
        magic, version, kind, probe, count, used, total = FRAME_HEADER.unpack_from(data.data)
        if magic != FRAME_MAGIC or version != VERSION or kind not in (_PAYLOADS, _ERROR):
            raise PayloadError(
                f"rank {len(frames)} sent a frame {magic!r} of version {version} and kind {kind}, "
                f"this hvd_fec reads {FRAME_MAGIC!r} of version {VERSION}: install the same "
                "hvd_fec on every rank and give every rank the same compressor"
            )
        if not FRAME_HEADER.size <= used <= total <= data.size:
            raise PayloadError(
                f"rank {len(frames)} sent a frame of {total} bytes with {used} in use, "
                f"{data.size} bytes are there"
            )
        body = data[FRAME_HEADER.size : used]
        if kind == _ERROR:
            raise RuntimeError(f"rank {len(frames)}: {bytes(body).decode(errors='replace')}")
        payloads = list(split(body))
        if len(payloads) != count:
            raise PayloadError(
                f"rank {len(frames)} sent {len(payloads)} payloads in a frame of {count}"
            )
        frames.append(Frame(probe, payloads))
        data = data[total:]
    return frames
