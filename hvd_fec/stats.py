"""What a compressor has sent so far, and how long that took."""

import math
import threading
from typing import Dict, Hashable, NamedTuple, Sequence

import numpy as np

PHASES = ("encode", "exchange", "decode")


class Totals(NamedTuple):
    """Counters of one compressor on one rank, at one moment or between two.

    Attributes:
        steps: training steps: exchanges of the tensor that was exchanged most often.
        bytes_dense: bytes that the same gradients take uncompressed.
        bytes_sent: bytes that were sent instead.
        elements: values of compressed tensors.
        kept: those of them that were sent.
        encode: seconds on the host before the last collective of each exchange. Exchanges that are
            under way together count one by one.
        exchange: seconds between calls on the host, in which the collectives wait for the slowest
            rank and move the bytes.
        decode: seconds on the host after the last collective.
    """

    steps: int = 0
    bytes_dense: int = 0
    bytes_sent: int = 0
    elements: int = 0
    kept: int = 0
    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0

    @property
    def ratio(self) -> float:
        """``bytes_dense / bytes_sent``; 1.0 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def density(self) -> float:
        """Fraction of the elements of compressed tensors that were kept."""
        return self.kept / self.elements if self.elements else 0.0

    def since(self, earlier: "Totals") -> "Totals":
        """What was counted after ``earlier``; all of it if the counters were reset meanwhile."""
        if self.steps < earlier.steps:
            return self
        return Totals._make(now - then for now, then in zip(self, earlier))


class TensorTotals(NamedTuple):
    """Counters of one compressed tensor.

    Attributes:
        calls: exchanges of it.
        size: its number of values.
        bytes_dense, bytes_sent, kept: as in :class:`Totals`, without headers of frames and tokens.
        gradient_norm, residual_norm: Euclidean norms of the last gradient that was sampled and of
            the residual after it, NaN before; see :meth:`Stats.sample_norms`.
    """

    calls: int = 0
    size: int = 0
    bytes_dense: int = 0
    bytes_sent: int = 0
    kept: int = 0
    gradient_norm: float = math.nan
    residual_norm: float = math.nan

    @property
    def ratio(self) -> float:
        """``bytes_dense / bytes_sent``."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def density(self) -> float:
        """Fraction of its values that were kept."""
        return self.kept / (self.calls * self.size) if self.calls else 0.0


class Stats:
    """Counters of one compressor on this rank. Cheap to read at any time.

    Bytes are those that this rank hands to Horovod for its gradients: payloads with their headers
    and padding, the tokens, and the tensors that go through uncompressed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bypassed: Dict[Hashable, int] = {}
        self._samples = 0
        self._reset()

    def _reset(self):
        self._tensors: Dict[Hashable, TensorTotals] = {}
        self._sampled: Dict[Hashable, int] = {}
        self._calls: Dict[Hashable, int] = {}
        self._counted = Totals()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def reset(self) -> None:
        """Start counting anew; what is known of bypassed tensors stays."""
        with self._lock:
            self._reset()

    # ---- for compressors ------------------------------------------------------------------------

    def add(
        self, names: Sequence[Hashable], arrays: Sequence[np.ndarray], sent: int, tally: np.ndarray
    ) -> None:
        """Count one exchange.

        Args:
            names: of its tensors; None where unknown.
            arrays: the gradients.
            sent: bytes of all that was handed to Horovod.
            tally: integers of shape (tensors, 2): values kept and bytes sent of each tensor.
        """
        kept, nbytes = np.asarray(tally).T.tolist()
        with self._lock:
            self._calls[names[0]] = self._calls.get(names[0], 0) + 1
            self._counted = self._counted._replace(
                bytes_dense=self._counted.bytes_dense + sum(array.nbytes for array in arrays),
                bytes_sent=self._counted.bytes_sent + sent,
                elements=self._counted.elements + sum(array.size for array in arrays),
                kept=self._counted.kept + sum(kept),
            )
            for name, array, kept_of, bytes_of in zip(names, arrays, kept, nbytes):
                if name is not None:
                    old = self._tensors.get(name, TensorTotals())
                    self._tensors[name] = old._replace(
                        calls=old.calls + 1,
                        size=array.size,
                        bytes_dense=old.bytes_dense + array.nbytes,
                        bytes_sent=old.bytes_sent + bytes_of,
                        kept=old.kept + kept_of,
                    )

    def add_sent(self, nbytes: int) -> None:
        """Count bytes of a further round of an exchange."""
        with self._lock:
            sent = self._counted.bytes_sent + nbytes
            self._counted = self._counted._replace(bytes_sent=sent)

    def bypass(self, key: Hashable, nbytes: int) -> None:
        """Note a tensor that goes through uncompressed in every step."""
        with self._lock:
            self._bypassed[key] = nbytes

    @property
    def bypassed(self) -> int:
        """Bytes of a step's tensors that go through uncompressed."""
        with self._lock:
            return sum(self._bypassed.values())

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Count time of one of ``PHASES``."""
        with self._lock:
            self._seconds[phase] += seconds

    def wants_norms(self, name: Hashable) -> bool:
        """Whether norms of this tensor were asked for and have not been sampled since."""
        return name is not None and self._sampled.get(name, 0) < self._samples

    def add_norms(self, name: Hashable, gradient: float, residual: float) -> None:
        """Note a sample; one that is not finite is left to the next step."""
        if math.isfinite(gradient) and math.isfinite(residual):
            with self._lock:
                self._sampled[name] = self._samples
                old = self._tensors.get(name, TensorTotals())
                self._tensors[name] = old._replace(gradient_norm=gradient, residual_norm=residual)

    # ---- for readers ----------------------------------------------------------------------------

    def totals(self) -> Totals:
        """All counters, as they are now."""
        with self._lock:
            steps = max(self._calls.values(), default=0)
            bypassed = steps * sum(self._bypassed.values())
            return self._counted._replace(
                steps=steps,
                bytes_dense=self._counted.bytes_dense + bypassed,
                bytes_sent=self._counted.bytes_sent + bypassed,
                **self._seconds,
            )

    def tensors(self) -> Dict[Hashable, TensorTotals]:
        """Counters of each compressed tensor, by the name that its residual has."""
        with self._lock:
            return dict(self._tensors)

    def sample_norms(self) -> None:
        """Ask for the norms of gradients and residuals in the next step.

        They take about as long as one addition of the gradients, which is why they are not taken
        in every step.
        """
        with self._lock:
            self._samples += 1

    @property
    def residual_norm(self) -> float:
        """Norm of all residuals over that of all gradients, when last sampled; 0.0 before."""
        sampled = [t for t in self.tensors().values() if not math.isnan(t.gradient_norm)]
        residual = math.hypot(*(t.residual_norm for t in sampled))
        gradient = math.hypot(*(t.gradient_norm for t in sampled))
        return residual / gradient if gradient else 0.0 if not residual else math.inf

    @property
    def steps(self) -> int:
        """Training steps: exchanges of the tensor that was exchanged most often."""
        return self.totals().steps

    @property
    def bytes_dense(self) -> int:
        """Bytes that the same gradients take uncompressed."""
        return self.totals().bytes_dense

    @property
    def bytes_sent(self) -> int:
        """Bytes that were sent instead."""
        return self.totals().bytes_sent

    @property
    def ratio(self) -> float:
        """``bytes_dense / bytes_sent``; 1.0 before the first step."""
        return self.totals().ratio

    @property
    def density(self) -> float:
        """Fraction of the elements of compressed tensors that were kept."""
        return self.totals().density

    def __repr__(self) -> str:
        now = self.totals()
        return (
            f"Stats(steps={now.steps}, bytes_dense={now.bytes_dense}, "
            f"bytes_sent={now.bytes_sent}, ratio={now.ratio:.1f}, density={now.density:.4%})"
        )
