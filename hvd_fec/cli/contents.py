"""What a file holds that compressors have written: payloads, frames, a compressor's state."""

import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Union

import numpy as np

from hvd_fec import checkpoint, wire
from hvd_fec.codecs import FecCodec
from hvd_fec.codecs.fec import FORMS


class Payload(NamedTuple):
    """One gradient on the wire. ``threshold`` is the exponent of the smallest kept magnitude,
    ``largest`` the largest decoded one; ``nonfinite`` counts elements that decode to NaN."""

    form: str
    dtype: str
    threshold: float
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    kept: int
    nbytes: int
    largest: float
    nonfinite: int


class Payloads(NamedTuple):
    """Payloads of a file, by the frame they are in; without frames there is one list."""

    framed: bool
    parts: List[List[Payload]]


class Residual(NamedTuple):
    """What error feedback holds back of one tensor. ``norm`` is the Euclidean one."""

    key: str
    size: int
    norm: float
    largest: float


class State(NamedTuple):
    """A compressor's state on one rank. ``rest`` is all that the file says beside the residuals."""

    compressor: str
    rank: int
    ranks: int
    rest: Dict[str, Any]
    residuals: List[Residual]


def read(path: Union[str, Path]) -> Union[Payloads, State]:
    """Read the whole file and prove it sound.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is torn, or something else; the text says which.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    try:
        if magic == wire.MAGIC:
            return Payloads(False, [[_payload(p) for p in wire.split(_bytes(path))]])
        if magic == wire.FRAME_MAGIC:
            frames = wire.split_frames(_bytes(path))
            return Payloads(True, [[_payload(p) for p in frame.payloads] for frame in frames])
    except wire.PayloadError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    except RuntimeError as error:
        raise ValueError(f"{path}: a frame that reports an error, {error}") from error
    if magic.startswith(b"PK"):
        return _state(path)
    raise ValueError(
        f"{path}: starts with {magic!r}, so it is no payload ({wire.MAGIC!r}), no frame "
        f"({wire.FRAME_MAGIC!r}) and no compressor's state (.npz)"
    )


def _bytes(path) -> np.ndarray:
    return np.fromfile(path, np.uint8)


def _payload(payload: np.ndarray) -> Payload:
    values = FecCodec().decode(payload)  # whatever threshold and form wrote it
    header = wire.read_header(payload)
    lowest = math.ldexp(1 + header.mantissa / 2**23, header.parameter)
    return Payload(
        FORMS[header.form],
        wire.DTYPE_NAMES[header.dtype],
        round(math.log2(lowest), 4),
        header.count,
        header.kept,
        header.nbytes,
        float(np.nanmax(np.abs(values), initial=0)),
        int(np.isnan(values).sum()),
    )


def _state(path) -> State:
    foreign = f"{path}: an .npz, but not the state of a compressor (hvd_fec.checkpoint)"
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            if "meta" not in saved.files:
                raise ValueError(f"{foreign}: it has {', '.join(saved.files[:3]) or 'no arrays'}")
            meta = json.loads(str(saved["meta"]))
            if not isinstance(meta, dict) or meta.pop("format", None) != checkpoint.FORMAT:
                raise ValueError(foreign)
            if meta.pop("version") != checkpoint.VERSION:
                raise ValueError(f"{path}: of another format than {checkpoint.VERSION}, known here")
            keys = meta.pop("keys")
            residuals = [_residual(key, saved[f"r{i}"]) for i, key in enumerate(keys)]
            settings = ", ".join(f"{name}={value!r}" for name, value in meta.pop("config").items())
            compressor = f"{meta.pop('compressor')}({settings})"
            return State(compressor, meta.pop("rank"), meta.pop("ranks"), meta, residuals)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, KeyError) as error:
        raise ValueError(f"{path}: damaged, or no file of hvd_fec ({error})") from error
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(foreign) from error


def _residual(key: str, residual: np.ndarray) -> Residual:
    values = residual.astype(np.float64)
    largest = float(np.abs(values).max(initial=0))
    return Residual(key, residual.size, float(np.linalg.norm(values)), largest)
