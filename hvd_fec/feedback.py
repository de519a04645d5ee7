"""Error feedback: what a compressor could not send yet, kept per tensor until it can.

The residual of a tensor is added to its next gradient (Seide et al. 2014, "1-bit SGD"; Karimireddy
et al. 2019, arXiv 1901.09847).
"""

import threading
from contextlib import contextmanager
from typing import Dict, Hashable, Iterator, List, Tuple

import numpy as np


class ResidualStore:
    """Residuals by key. One store belongs to one compressor object.

    A key names a tensor for as long as training lasts, across retraces (``callsite.py`` makes
    them); memory is one float32 per element of every tensor that was compressed.
    """

    def __init__(self):
        self._residuals: Dict[Hashable, Tuple[np.ndarray, threading.Lock]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, key: Hashable, size: int) -> Iterator[np.ndarray]:
        """The residual of ``key`` for updating in place: float32 of shape (size,), zeros at first
        or if the size changed. Nobody else gets it meanwhile: one step may reduce two gradients
        of the same variable at the same time."""
        with self._lock:
            residual, lock = self._residuals.get(key, (None, None))
            if residual is None or residual.size != size:
                residual, lock = np.zeros(size, np.float32), threading.Lock()
                self._residuals[key] = residual, lock
        with lock:
            yield residual

    def clear(self) -> None:
        """Forget all residuals."""
        with self._lock:
            self._residuals.clear()

    def __len__(self) -> int:
        return len(self._residuals)

    def items(self) -> List[Tuple[Hashable, np.ndarray]]:
        """Keys and residuals, as they are now."""
        with self._lock:
            return [(key, residual) for key, (residual, _) in self._residuals.items()]
