"""What a compressor has sent so far."""

import threading
from typing import Dict, Hashable


class Stats:
    """Counters of one compressor on this rank. Cheap to read at any time.

    Bytes are those that this rank hands to Horovod for its gradients: payloads with their headers
    and padding, the tokens, and the tensors that go through uncompressed.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._reset()

    def _reset(self):
        self._calls: Dict[Hashable, int] = {}
        self._bypassed: Dict[Hashable, int] = {}
        self._dense = self._sent = self._elements = self._kept = 0

    def reset(self) -> None:
        """Start counting anew; what is known of bypassed tensors stays."""
        with self._lock:
            bypassed = self._bypassed
            self._reset()
            self._bypassed = bypassed

    def add(self, key: Hashable, dense: int, sent: int, elements: int, kept: int) -> None:
        """Count one exchange of the tensors that ``key`` stands for."""
        with self._lock:
            self._calls[key] = self._calls.get(key, 0) + 1
            self._dense += dense
            self._sent += sent
            self._elements += elements
            self._kept += kept

    def add_sent(self, nbytes: int) -> None:
        """Count bytes of a further round of an exchange."""
        with self._lock:
            self._sent += nbytes

    def bypass(self, key: Hashable, nbytes: int) -> None:
        """Note a tensor that goes through uncompressed in every step."""
        with self._lock:
            self._bypassed[key] = nbytes

    @property
    def steps(self) -> int:
        """Training steps: exchanges of the tensor that was exchanged most often."""
        return max(self._calls.values(), default=0)

    @property
    def bytes_dense(self) -> int:
        """Bytes that the same gradients take uncompressed."""
        return self._dense + self.steps * sum(self._bypassed.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that were sent instead."""
        return self._sent + self.steps * sum(self._bypassed.values())

    @property
    def ratio(self) -> float:
        """``bytes_dense / bytes_sent``; 1.0 before the first step."""
        return self.bytes_dense / self.bytes_sent if self._sent else 1.0

    @property
    def density(self) -> float:
        """Fraction of the elements of compressed tensors that were kept."""
        return self._kept / self._elements if self._elements else 0.0

    def __repr__(self) -> str:
        return (
            f"Stats(steps={self.steps}, bytes_dense={self.bytes_dense}, "
            f"bytes_sent={self.bytes_sent}, ratio={self.ratio:.1f}, density={self.density:.4%})"
        )
