"""A compressor's state in a file: one ``.npz`` per rank, replaced as a whole.

The file holds the residuals as arrays ``r0``, ``r1``, ... and a JSON text ``meta`` with the
format's version, the residuals' keys, the rest of the state, the training's step, rank and number
of ranks, and the compressor's class and settings. NumPy reads it without unpickling anything.
"""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, Tuple, Union

import numpy as np

FORMAT, VERSION = "hvd_fec compressor state", 1


# What reading damaged bytes as an .npz can end in. zipfile raises RuntimeErrors for archives of a
# kind that it cannot read.
_UNREADABLE = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError),
    *(ValueError, KeyError, TypeError, AttributeError),
)


class CheckpointError(ValueError):
    """A file that cannot be used; the text says why and what to do."""


class MismatchError(CheckpointError):
    """A file that is in order, but of another rank, another number of ranks, another compressor."""


def save(path: Union[str, Path], compressor: Any, rank: int, ranks: int, step: int = 0) -> None:
    """Write the state of ``compressor`` on this rank; the folder must exist.

    A kill at any moment leaves the old file or the new one. ``step`` is how many the training has
    done; :func:`restore` returns it.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    state = dict(compressor.state_dict())
    residuals = state.pop("residuals")
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "ranks": ranks,
        "step": step,
        **_kind(compressor),
        "keys": list(residuals),
        "state": state,
    }
    arrays = {f"r{i}": residual for i, residual in enumerate(residuals.values())}
    fresh = path.with_name(f".{path.name}.part")
    with open(fresh, "wb") as stream:
        np.savez(stream, meta=np.array(json.dumps(meta)), **arrays)
        stream.flush()
        os.fsync(stream.fileno())  # else a power cut could leave the new name and no bytes
    os.replace(fresh, path)


def restore(path: Union[str, Path], compressor: Any, rank: int, ranks: int) -> int:
    """Load what :func:`save` wrote; ``compressor`` changes only if all of it is good.

    Returns:
        The training's step.

    Raises:
        As :func:`read`.
    """
    state, step = read(path, compressor, rank, ranks)
    compressor.load_state_dict(state)
    return step


def read(path: Union[str, Path], compressor: Any, rank: int, ranks: int) -> Tuple[dict, int]:
    """What :func:`save` wrote for such a compressor, which is left as it is.

    Returns:
        The state, for ``load_state_dict``, and the training's step.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is torn, no file of :func:`save`, or of a newer format.
        MismatchError: it is the state of another rank, another number of ranks or another
            compressor.
    """
    try:
        # Opened here, as np.load leaves a torn file open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            if not hasattr(saved, "files") or "meta" not in saved.files:
                raise CheckpointError(f"{path}: not the state of a compressor")
            meta = json.loads(str(saved["meta"]))
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                raise CheckpointError(f"{path}: not the state of a compressor")
            if meta["version"] != VERSION:
                raise CheckpointError(
                    f"{path}: format {meta['version']}, this version of hvd_fec reads {VERSION}: "
                    "use the version that wrote it, or start without the file"
                )
            residuals = {key: saved[f"r{i}"] for i, key in enumerate(meta["keys"])}
            state, step = {**meta["state"], "residuals": residuals}, int(meta["step"])
    except (FileNotFoundError, CheckpointError):
        raise
    except _UNREADABLE as error:
        raise _torn(path, error) from error
    now = {"rank": rank, "ranks": ranks, **json.loads(json.dumps(_kind(compressor)))}
    changed = [f"{k} {meta.get(k)}, not {v}" for k, v in now.items() if meta.get(k) != v]
    if changed:
        raise MismatchError(f"{path}: is the state of {'; '.join(changed)}")
    if any(r.dtype != np.float32 or r.ndim != 1 for r in residuals.values()):
        raise _torn(path, "residuals are float32 vectors")
    return state, step


def _kind(compressor) -> dict:
    return {"compressor": type(compressor).__name__, "config": compressor.get_config()}


def _torn(path, error) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged, or no file of hvd_fec ({error}): delete it, or resume from an older one"
    )
