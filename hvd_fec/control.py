"""The threshold that sends as much as was asked for."""

import math
import threading
import warnings
from typing import Callable, Hashable, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

SAMPLE = 1 << 17
"""About so many values of an exchange are looked at where nothing is known of them."""

_LOWEST, _HIGHEST = -126.0, 113.0
_FIRST = 16  # rounds in which residuals fill and thresholds move quickly
_GAIN = 0.75
_STEEP = 16.0  # a slope beyond this is noise
_LARGEST_STEP = 2.0  # octaves
_LOST = 4.0  # times too much or too little: the values are not those of the step before
_PAID_BACK = 5.0  # rounds in which what was sent too much is saved again
_DEBT = 10.0  # rounds' worth of what is remembered


class Plan(NamedTuple):
    """What an exchange is to send: bytes, or values where the aim is a density.

    Attributes:
        elements: values that there are.
        goal: what is to be sent.
        fixed: the part of it that no threshold changes: headers, tokens.
        extra: what else every round sends or has to save, however many exchanges it has.
    """

    elements: int
    goal: float
    fixed: float = 0.0
    extra: float = 0.0


class ThresholdControl:
    """One threshold for all that a compressor sends, led from step to step.

    One for all tensors, because then whatever is sent is larger than whatever is not: of all ways
    to spend a number of values, that leaves the smallest residual (Euclidean norm). A *round* is
    all exchanges of one training step; it is over when one of them comes again.

    From the values kept and those well above the threshold follows how their number changes with
    the threshold, so a round's error tells the next threshold, without a look of its own at the
    gradients. What was sent too much or too little in all, up to a bound, is made up for within
    the next rounds. Where this does not hold, in the first rounds and after one that missed by a
    factor of 4, the threshold is a quantile of a sample of the values.

    Args:
        cost: what a kept value takes of the goal, about, until that is known.
    """

    def __init__(self, cost: float) -> None:
        self._first_cost = cost
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.restore([None, 0.0, 0, self._first_cost, True])
        self._warned = False

    def state(self) -> list:
        """What :meth:`restore` takes to go on from here: numbers and None. Take it between two
        steps."""
        with self._lock:
            if self._labels:
                self._close_round()
            return [self._exponent, self._debt, self._rounds, self._cost, self._lost]

    def restore(self, state: Sequence) -> None:
        """Go on from what :meth:`state` returned."""
        exponent, debt, rounds, cost, lost = state
        with self._lock:
            self._exponent: Optional[float] = None if exponent is None else float(exponent)
            self._debt, self._rounds, self._cost = float(debt), int(rounds), float(cost)
            self._open_round(bool(lost))

    def _open_round(self, lost: bool) -> None:
        self._lost = lost  # the threshold is to be looked for
        self._spoiled = False
        self._labels: Set[Hashable] = set()
        self._elements = self._kept = self._above = 0
        self._goal = self._fixed = self._extra = self._sent = 0.0
        self._samples: List[Tuple[np.ndarray, int]] = []

    @property
    def exponent(self) -> Optional[float]:
        """The threshold now, as an exponent of 2; None before the first."""
        return self._exponent

    # ---- an exchange: these in turn -------------------------------------------------------------

    def enter(self, label: Hashable) -> int:
        """Begin an exchange; returns the number of rounds before this one. ``label`` is the same
        in every step."""
        with self._lock:
            if label in self._labels:
                self._close_round()
            self._labels.add(label)
            return self._rounds

    def threshold(self, plan: Plan, sample: Callable[[], np.ndarray]) -> float:
        """The threshold for the exchange, as an exponent of 2.

        ``sample`` gives magnitudes of its values or, where there are more than ``SAMPLE``, of an
        even sample of them: float32 of shape (some,).
        """
        with self._lock:
            self._elements += plan.elements
            self._goal += plan.goal
            self._fixed += plan.fixed
            self._extra = plan.extra
            if self._lost:
                expected = min(self._free() / self._cost, self._elements / 2)
                self._samples.append((sample(), plan.elements))
                self._exponent = self._quantile(expected)
            assert self._exponent is not None  # the first round is a lost one
            return self._exponent

    def count(self, sent: float, kept: int, above: int, usual: bool) -> None:
        """Note what the exchange sent, and how many values: ``kept`` at least as large as the
        threshold, ``above`` by a quarter of its power of two. Where it was not as ``usual`` it
        says nothing of the exchanges to come."""
        with self._lock:
            self._sent += sent
            self._kept += kept
            self._above += above
            self._spoiled |= not usual

    # ---------------------------------------------------------------------------------------------

    def _quantile(self, expected: float) -> float:
        values = np.concatenate([values for values, _ in self._samples])
        each = np.concatenate([np.full(v.size, n / max(1, v.size)) for v, n in self._samples])
        order = np.argsort(values)[::-1]
        at = int(np.searchsorted(np.cumsum(each[order]), expected))
        value = float(values[order[min(at, values.size - 1)]]) if values.size else 0.0
        if not 0 < value < math.inf:  # nothing to tell it from
            return -9.0 if self._exponent is None else self._exponent
        return min(max(math.log2(value), _LOWEST), _HIGHEST)

    def _free(self) -> float:
        """What the values of this round may take."""
        goal = self._goal + self._extra
        free = goal - self._fixed
        if free < goal / 4:
            # Out of reach. Training had better go on with few values than with none.
            free = max(goal, self._goal / 4) / 4
        return min(max(free - self._debt / _PAID_BACK, free / 2), 2 * free)

    def _close_round(self) -> None:
        lost, free, sent = self._lost, self._free(), self._sent - self._fixed
        kept, above = self._kept, self._above
        goal, fixed = self._goal + self._extra, self._fixed
        most, spoiled = self._elements / 2, self._spoiled or not self._elements
        debt = self._debt + self._sent - goal
        bound = _DEBT * self._goal
        self._rounds += 1
        self._open_round(lost if spoiled else self._rounds < _FIRST)
        if spoiled:
            return
        if fixed > goal:
            self._warn(goal, fixed)
        self._debt = min(max(debt, -bound), bound)
        if not kept or not free / _LOST < sent < free * _LOST:
            self._lost = True
        if not kept or self._exponent is None:
            return
        self._cost = max(sent / kept, 1e-3)
        if kept > most and sent < free:
            return  # there is hardly more to send
        power = 2.0 ** math.floor(self._exponent)
        width = math.log2(1 + power / 4 / 2.0**self._exponent)
        slope = math.log2(kept / above) / width if above else _STEEP
        change = _GAIN * math.log2(sent / free) / min(max(slope, 1.0), _STEEP) if sent > 0 else 0.0
        change = min(max(change, -_LARGEST_STEP), _LARGEST_STEP)
        self._exponent = min(max(self._exponent + change, _LOWEST), _HIGHEST)

    def _warn(self, goal: float, fixed: float) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the ratio asked for leaves {max(goal, 0):,.0f} bytes a step, and headers alone "
                f"take {fixed:,.0f}: hvd_fec sends more. Give Horovod's optimizer groups=1, so "
                "that all gradients share one exchange, leave min_size out, or ask for less",
                RuntimeWarning,
                stacklevel=2,
            )
