"""Error feedback: what a compressor could not send yet, kept per tensor until it can.

The residual of a tensor is added to its next gradient (Seide et al. 2014, "1-bit SGD"; Karimireddy
et al. 2019, arXiv 1901.09847).
"""

import re
import threading
import warnings
from contextlib import contextmanager
from typing import Dict, Hashable, Iterator, List, Mapping, Tuple

import numpy as np


class ResidualStore:
    """Residuals by key. One store belongs to one compressor object.

    A key names a tensor for as long as training lasts, across retraces and in a run that resumes
    (:class:`Names` makes them); memory is one float32 per element of every tensor that was
    compressed.
    """

    def __init__(self) -> None:
        self._residuals: Dict[Hashable, Tuple[np.ndarray, threading.Lock]] = {}
        self._restored: Dict[Hashable, np.ndarray] = {}
        self._warns = False
        self._lock = threading.Lock()

    @contextmanager
    def use(self, key: Hashable, size: int) -> Iterator[np.ndarray]:
        """The residual of ``key`` for updating in place: float32 of shape (size,), zeros at first
        or if the size changed. Nobody else gets it meanwhile: one step may reduce two gradients
        of the same variable at the same time."""
        with self._lock:
            if key not in self._residuals or self._residuals[key][0].size != size:
                self._residuals[key] = self._first(key, size), threading.Lock()
            residual, lock = self._residuals[key]
        with lock:
            yield residual

    def _first(self, key: Hashable, size: int) -> np.ndarray:
        restored = self._restored.pop(key, None)
        if restored is not None and restored.size == size:
            return restored
        if self._warns:
            self._warns = False
            had = "none" if restored is None else f"one of {restored.size} elements"
            warnings.warn(
                f"no residual to restore for {key} of {size} elements (the saved state has {had}):"
                " its error feedback starts from zero, as for a changed model; further ones like "
                "this are not mentioned",
                RuntimeWarning,
                stacklevel=2,
            )
        return np.zeros(size, np.float32)

    def state(self) -> Dict[Hashable, np.ndarray]:
        """A copy of every residual by its key, each between two updates: float32 of shape (size,).

        Residuals that were restored and not used since are among them.
        """
        with self._lock:
            found = dict(self._residuals)
            state = {key: residual.copy() for key, residual in self._restored.items()}
        for key, (residual, lock) in found.items():
            with lock:
                state[key] = residual.copy()
        return state

    def restore(self, state: Mapping[Hashable, np.ndarray]) -> None:
        """Go on from what :meth:`state` returned, in place of all residuals.

        A residual is taken up when its key is first used. What does not fit then (an unknown key,
        another size) starts from zero, with one RuntimeWarning for all.
        """
        restored = {key: np.array(value, np.float32).reshape(-1) for key, value in state.items()}
        with self._lock:
            self._residuals.clear()
            self._restored = restored
            self._warns = bool(restored)

    def clear(self) -> None:
        """Forget all residuals."""
        with self._lock:
            self._residuals.clear()
            self._restored.clear()
            self._warns = False

    def __len__(self) -> int:
        return len(self._residuals)

    def items(self) -> List[Tuple[Hashable, np.ndarray]]:
        """Keys and residuals, as they are now."""
        with self._lock:
            return [(key, residual) for key, (residual, _) in self._residuals.items()]


_HANDLE = re.compile(r'name="(.*?)(?:/\d+)?", device=')


class Names:
    """Names of variables that are the same in every run of a program.

    TensorFlow prints a resource handle with a number that counts all that the process has made so
    far, which a resumed run need not repeat. What it does repeat is the variable's own name and
    its place among the variables that are reduced together.
    """

    def __init__(self) -> None:
        self._names: Dict[str, str] = {}
        self._taken: Dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, handle: str, index: int) -> str:
        """``name[index]`` for a handle as printed, the same whenever it is asked for. A second
        variable of this name and index, as in the second of two equal models, gets ``#2``."""
        with self._lock:
            if handle not in self._names:
                match = _HANDLE.search(handle)
                name = f"{match[1] if match else 'variable'}[{index}]"
                copy = self._taken[name] = self._taken.get(name, 0) + 1
                self._names[handle] = name if copy == 1 else f"{name}#{copy}"
            return self._names[handle]
