"""The compressors that Horovod takes as ``compression=``."""

import hashlib
import math
import os
import threading
import warnings
from abc import abstractmethod
from functools import partial
from numbers import Real
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_fec import callsite, exchange, wire
from hvd_fec.batching import BatchCompressor
from hvd_fec.batching import norm as _norm
from hvd_fec.codecs import FecCodec, TernaryCodec
from hvd_fec.codecs.arrays import each
from hvd_fec.codecs.ternary import Survey, gathers, survey
from hvd_fec.control import SAMPLE, Plan, ThresholdControl
from hvd_fec.cost import two_shot_pays
from hvd_fec.survey import failed_row, fingerprint, read, row

_BITS_RATIO = 6.4
_GENTLEST = 8.0
"""Ratio at which a warm-up begins: planes can hardly be larger."""
_SMALL = 1 << 14
_BYTES_PER_VALUE = 2.25  # of planes with one value in a thousand or more


class FEC(BatchCompressor):
    """Fixed-exponential compression: send 5 bits of every value whose exponent is large enough.

    Give an instance to ``hvd.DistributedOptimizer``, ``hvd.DistributedGradientTape``,
    ``hvd.allreduce`` or ``hvd.grouped_allreduce`` as ``compression=``. The result is the sum or
    mean over ranks of what the ranks sent, the same to the last bit on every rank; with error
    feedback what was not sent is added to the next gradient of the same variable. The bytes and
    the quantiser are those of :class:`hvd_fec.codecs.FecCodec`.

    How much is sent follows from one of ``threshold``, ``ratio`` and ``density``. With the latter
    two each rank finds a threshold for all its tensors, anew in every step
    (:class:`hvd_fec.control.ThresholdControl`).

    Args:
        threshold: keep a value when its magnitude is at least ``2**threshold``; an integer in the
            published scheme, but any number from -126 to 113 will do. -9 if nothing else is given.
        error_feedback: keep residuals. Without them what is below the threshold is lost.
        min_size: tensors of fewer elements go through Horovod uncompressed, as do integer tensors
            and tensors whose size is not known when the graph is built. By default 1024 with a
            threshold, and 1 with a ratio or a density, which are to hold for the whole model.
        process_set: exchange in this process set; by default in the one that Horovod reduces in.
        exchange: ``"allgather"`` sends every payload to every rank: exact, and each rank receives
            as many payloads as there are ranks. ``"twoshot"`` has each rank average one slice of
            every tensor and pass the average on, compressed once more with a residual of its own:
            less than two payloads per rank for any number of ranks. ``"auto"`` chooses by
            :func:`hvd_fec.cost.two_shot_pays`.
        form: ``"planes"``, or ``"coded"`` for fewer bytes and more work: see
            :class:`hvd_fec.codecs.FecCodec`. Ranks may differ in it.
        ratio: send so many times fewer bytes than the gradients have, above 6.4 (5 bits a value),
            over all tensors and headers, and all steps. May be set anew at any time.
        density: send this share of the values, above 0 and at most 0.5. May be set anew.
        warmup_steps: steps in which the compression grows to ``ratio`` or ``density``, by an equal
            factor each.
        momentum: accumulate the gradients with this momentum before they are selected, and give
            the optimizer none (momentum correction; Lin et al. 2018, "Deep Gradient Compression",
            arXiv 1712.01887). 0 for none. It takes one more float32 per element.
        nesterov: Nesterov's momentum.
        masking: drop the momentum of a value that was sent (momentum factor masking, in the same
            paper), so that stale momentum does not carry on.
        clip_norm: scale the gradients of an exchange down to a norm of this over sqrt(ranks)
            before they are accumulated (local gradient clipping, in the same paper).

    Raises:
        ValueError: an argument is out of range, or two that exclude each other; in use, an op
            other than Sum or Average, or a process set that is not Horovod's.
    """

    def __init__(
        self,
        threshold: Optional[float] = None,
        error_feedback: bool = True,
        min_size: Optional[int] = None,
        process_set: Any = None,
        exchange: str = "auto",
        form: str = "planes",
        *,
        ratio: Optional[float] = None,
        density: Optional[float] = None,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
        masking: bool = True,
        clip_norm: Optional[float] = None,
    ) -> None:
        given = [v is not None for v in (threshold, ratio, density)]
        if sum(given) > 1:
            raise ValueError(
                f"threshold={threshold!r}, ratio={ratio!r} and density={density!r} exclude each "
                "other: give one of them"
            )
        if exchange not in ("auto", "allgather", "twoshot"):
            raise ValueError(f"exchange must be 'auto', 'allgather' or 'twoshot', not {exchange!r}")
        if not _is_number(warmup_steps) or int(warmup_steps) != warmup_steps or warmup_steps < 0:
            raise ValueError(f"warmup_steps must be a non-negative integer, not {warmup_steps!r}")
        if not _is_number(momentum) or not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, not {momentum!r}")
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        if momentum and not error_feedback:
            raise ValueError("momentum is accumulated in residuals: it needs error_feedback=True")
        if clip_norm is not None and not (_is_number(clip_norm) and 0 < clip_norm < math.inf):
            raise ValueError(f"clip_norm must be None or a positive number, not {clip_norm!r}")
        controlled = ratio is not None or density is not None
        if warmup_steps and not controlled:
            raise ValueError("warmup_steps needs a ratio or a density to warm up to")
        super().__init__(
            error_feedback,
            (1 if controlled else 1024) if min_size is None else min_size,
            process_set,
        )
        self._codec = FecCodec(-9 if threshold is None else threshold, form)
        self._ratio: Optional[float] = None
        self._density: Optional[float] = None
        self._controls: List[ThresholdControl] = []
        if controlled:
            # Of payloads, and of the means in two shots; in bytes, or in values.
            cost = _BYTES_PER_VALUE if density is None else 1.0
            self._controls = [ThresholdControl(cost), ThresholdControl(cost)]
            if density is None:
                self.ratio = ratio
            else:
                self.density = density
        self._given = self._asked()
        self.exchange = exchange
        self.warmup_steps = int(warmup_steps)
        self.momentum, self.nesterov, self.masking = float(momentum), bool(nesterov), bool(masking)
        self.clip_norm = None if clip_norm is None else float(clip_norm)
        self._warned_momentum = False

    @property
    def threshold(self) -> Optional[float]:
        """Exponent of the smallest kept magnitude: of all steps, or, where it follows from a ratio
        or a density, of the last one; None before that."""
        return self._controls[0].exponent if self._controls else self._codec.threshold

    @property
    def ratio(self) -> Optional[float]:
        """Gradient bytes over bytes to send, or None. May be set in mid-training, on each rank for
        itself, if it was given at first."""
        return self._ratio

    @ratio.setter
    def ratio(self, value: float) -> None:
        self._check_settable(self._density, "ratio")
        if not _is_number(value) or not _BITS_RATIO < value < math.inf:
            raise ValueError(
                f"ratio must be above {_BITS_RATIO}, which is what 5 bits a value give, not "
                f"{value!r}"
            )
        self._ratio = float(value)

    @property
    def density(self) -> Optional[float]:
        """Share of the values to send, or None. May be set as ``ratio`` may."""
        return self._density

    @density.setter
    def density(self, value: float) -> None:
        self._check_settable(self._ratio, "density")
        if not _is_number(value) or not 0 < value <= 0.5:
            raise ValueError(f"density must be above 0 and at most 0.5, not {value!r}")
        self._density = float(value)

    def _check_settable(self, other, name) -> None:
        if not self._controls or other is not None:
            raise ValueError(f"this compressor was not made with a {name}: make it FEC({name}=...)")

    def get_config(self) -> dict:
        """The settings as given at first, without the process set."""
        return {
            "threshold": None if self._controls else self._codec.threshold,
            "form": self._codec.form,
            "error_feedback": self.error_feedback,
            "min_size": self.min_size,
            "exchange": self.exchange,
            "ratio": self._given if self._density is None else None,
            "density": self._given if self._ratio is None else None,
            "warmup_steps": self.warmup_steps,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "masking": self.masking,
            "clip_norm": self.clip_norm,
        }

    def reset(self) -> None:
        """Forget residuals, momentum, thresholds and counters, as for a new training run."""
        super().reset()
        for control in self._controls:
            control.reset()

    def state_dict(self) -> dict:
        """As for all compressors; what the thresholds follow from under ``"control"``."""
        control: list = [c.state() for c in self._controls]
        return {**super().state_dict(), "control": control and [*control, self._asked()]}

    def load_state_dict(self, state: Mapping) -> None:
        """As for all compressors."""
        super().load_state_dict(state)
        if self._controls and state["control"]:
            *controls, asked = state["control"]
            for control, saved in zip(self._controls, controls):
                control.restore(saved)
            if self._ratio is not None:
                self.ratio = asked
            else:
                self.density = asked

    def _asked(self) -> Optional[float]:
        """Ratio or density, as set last."""
        return self._density if self._ratio is None else self._ratio

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any = None) -> Tuple[tf.Tensor, Any]:
        """As for all compressors; warns where momentum would be applied twice."""
        if isinstance(self, FEC) and self.momentum and not self._warned_momentum:
            kind = callsite.momentum_of_optimizer()
            if kind:
                self._warned_momentum = True
                warnings.warn(
                    f"the optimizer has {kind}, and the compressor accumulates momentum too: it "
                    "would count twice. Make the optimizer plain SGD(learning_rate), or leave "
                    "momentum out of the compressor",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return super().compress(tensor)

    # ---- one exchange ---------------------------------------------------------------------------

    def _build(self, ex):
        ranks = ex.process_set.size() if ex.process_set.included() else 1
        # The graph outlives a change of an elastic job's size, and must be the same on all ranks.
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        pays = not elastic and two_shot_pays(ranks, 4 * sum(ex.sizes))
        bundles = exchange.Bundles(ex.sizes, ex.dtypes, _SMALL if self._controls else 0)
        if self.exchange == "twoshot" or (self.exchange == "auto" and pays):
            return self._build_two_shot(ex, bundles)

        def encode(names, *arrays):
            names, arrays = bundles.join(names, arrays)
            whole = [(i, slice(0, size)) for i, size in enumerate(bundles.sizes)]
            [frame], tally = self._frames(ex, names, arrays, [whole])
            self._count(names, arrays, frame.nbytes + ex.token_bytes, tally)
            return frame

        def decode(names, gathered, token):
            results = self._buffers.zeros(bundles.sizes)
            exchange.decode_frames(gathered, token, self._codec.decode_add, results)
            return ex.cast(bundles.split(results))

        frame = tf.ensure_shape(ex.on_host(encode, ex.tensors, tf.uint8), [None])
        gathered = exchange.gather(frame, ex.name, ex.process_set)
        return ex.on_host(decode, [gathered, ex.token], ex.dtypes, "decode")

    def _build_two_shot(self, ex, bundles):
        sizes = bundles.sizes

        def scatter(names, *arrays):
            names, arrays = bundles.join(names, arrays)
            ranks = ex.process_set.size()
            shares = [exchange.share(sizes, rank, ranks) for rank in range(ranks)]
            frames, tally = self._frames(ex, names, arrays, shares, ranks / (ranks + 1))
            sent = sum(frame.nbytes for frame in frames)
            self._count(names, arrays, sent + ex.token_bytes, tally)
            return np.concatenate(frames), np.array([f.size for f in frames], np.int32)

        def average(names, received):
            rank, ranks = ex.process_set.rank(), ex.process_set.size()
            names, _ = bundles.join(names)
            try:
                frames = wire.split_frames(received)
                share = exchange.share(sizes, rank, ranks)
                means = self._buffers.zeros([piece.stop - piece.start for _, piece in share])
                exchange.add_frames(frames, means, self._codec.decode_add, 1 / ranks)
            except Exception as error:  # as in _frames
                return wire.pack_error(str(error))
            names = [names[i] and f"{names[i]}, mean of {rank}/{ranks}" for i, _ in share]
            whole = [(i, slice(0, mean.size)) for i, mean in enumerate(means)]
            [frame], _ = self._frames(ex, names, means, [whole], 1 / (ranks + 1), means=True)
            self._stats.add_sent(frame.nbytes)
            return frame

        def decode(names, gathered, token):
            frames = wire.split_frames(gathered)
            factor = exchange.factor_of(token, exchange.mean_probe(frames), 1)
            results = self._buffers.zeros(sizes)
            for rank, frame in enumerate(frames):
                share = exchange.share(sizes, rank, len(frames))
                pieces = [results[i][piece] for i, piece in share]
                exchange.check_frame(rank, frame, [piece.size for piece in pieces])
                exchange.add_frames([frame], pieces, self._codec.decode_add, factor)
            return ex.cast(bundles.split(results))

        frames, splits = ex.on_host(scatter, ex.tensors, [tf.uint8, tf.int32])
        frames, splits = tf.ensure_shape(frames, [None]), tf.ensure_shape(splits, [None])
        received = exchange.scatter(frames, splits, ex.name, ex.process_set)
        frame = tf.ensure_shape(ex.on_host(average, [received], tf.uint8), [None])
        gathered = exchange.gather(frame, f"{ex.name}_gather", ex.process_set)
        return ex.on_host(decode, [gathered, ex.token], ex.dtypes, "decode")

    def _frames(self, ex, names, arrays, shares, part=1.0, means=False):
        """A frame for each of ``shares`` of ``arrays``, which make up ``part`` of what the exchange
        sends; and of each array the values kept and the bytes in the frames, shape (arrays, 2)."""
        tally = np.zeros((len(arrays), 3), np.int64)
        try:
            accelerated = bool(self.momentum) and not means
            finite = [True] * len(arrays)
            if len(shares) > 1 or accelerated:
                # A value that is not finite must leave all of a tensor's state alone.
                finite = [self._codec.is_finite(array) for array in arrays]
            if not means and self.clip_norm is not None and all(finite):
                arrays = _clipped(arrays, self.clip_norm / math.sqrt(ex.process_set.size()))
            codec = self._choose(ex, names, arrays, shares, part, means)
            frames, usual = [], True
            for share in shares:
                calls = [
                    partial(self._encode, codec, names[i], arrays[i], piece, finite[i], accelerated)
                    for i, piece in share
                ]
                encoded = each(calls, [piece.stop - piece.start for _, piece in share])
                for (i, _), (payload, above) in zip(share, encoded):
                    header = wire.read_header(payload)
                    tally[i] += header.kept, payload.size, above
                    usual &= not header.flags & wire.NONFINITE
                frames.append(wire.pack_frame(ex.probe, [payload for payload, _ in encoded]))
            if self._controls:
                sent = sum(frame.nbytes for frame in frames) + ex.token_bytes * (not means)
                kept, _, above = tally.sum(axis=0).tolist()
                amount = sent if self.density is None else kept
                self._controls[means].count(amount, kept, above, usual)
        except Exception as error:  # every rank must hear of it, or they wait here forever
            failed = wire.pack_error(f"{type(error).__name__}: {error}")
            return [failed] * len(shares), tally[:, :2]
        return frames, tally[:, :2]

    def _choose(self, ex, names, arrays, shares, part, means) -> FecCodec:
        """The codec of this exchange, or of its means."""
        if not self._controls:
            if not means:
                return self._codec
            # Means of n independent values are sqrt(n) times smaller: this keeps as many of them.
            lower = self._codec.threshold - math.log2(ex.process_set.size()) / 2
            return FecCodec(max(lower, -126), self._codec.form)
        control = self._controls[means]
        done = (control.enter(ex.label) + 1) / (self.warmup_steps + 1)
        elements = sum(array.size for array in arrays)
        if self._ratio is not None:
            ratio = max(self._ratio ** min(done, 1), min(self._ratio, _GENTLEST))
            headers = wire.FRAME_HEADER.size * len(shares)
            headers += wire.HEADER.size * sum(map(len, shares))
            bypassed = self._stats.bypassed
            plan = Plan(
                elements,
                part * ex.dense_bytes / ratio,
                headers + ex.token_bytes * (not means),
                0.0 if means else bypassed / ratio - bypassed,
            )
        else:
            assert self._density is not None
            plan = Plan(elements, elements * min(0.5, self._density ** min(done, 1)))
        sample = partial(self._sample, names, arrays, 0.0 if means else self.momentum)
        return FecCodec(control.threshold(plan, sample), self._codec.form)

    def _sample(self, names, arrays, momentum) -> np.ndarray:
        """Magnitudes of what is about to be encoded: of every value, or of some."""
        step = max(1, sum(array.size for array in arrays) // SAMPLE)
        parts = []
        for name, array in zip(names, arrays):
            part = array.reshape(-1)[::step].astype(np.float32)
            if self.error_feedback and name is not None:
                with self.residuals.use(name, array.size) as residual:
                    if momentum:
                        with self.residuals.use(_velocity(name), array.size) as velocity:
                            part = _accelerated(part, velocity[::step].copy(), self)
                    part = part + residual[::step]
            parts.append(np.abs(part))
        return np.concatenate(parts)

    def _encode(self, codec, name, array, piece, finite, accelerated):
        """Payload of a piece of a tensor, and how many of its values are well above the
        threshold."""
        flat = array.reshape(-1)[piece]
        if not self.error_feedback or name is None or not finite:
            return codec.encode_counting(flat)
        with self.residuals.use(name, array.size) as residual:
            if not accelerated:
                return codec.encode_counting(flat, residual[piece])
            with self.residuals.use(_velocity(name), array.size) as velocity:
                velocity = velocity[piece]
                x = _accelerated(flat.astype(np.float32), velocity, self)
                payload, above = codec.encode_counting(x, residual[piece])
                if self.masking:
                    velocity[codec.decode(payload) != 0] = 0
                return payload, above


def _velocity(name: str) -> str:
    """Under which name the momentum of a tensor is kept."""
    return f"{name}, momentum"


def _accelerated(gradient: np.ndarray, velocity: np.ndarray, fec: FEC) -> np.ndarray:
    """Update ``velocity`` in place; returns what it adds to the residual. Both float32, finite."""
    with np.errstate(over="ignore"):
        if fec.nesterov:
            velocity += gradient
            velocity *= np.float32(fec.momentum)
            x = velocity + gradient
        else:
            velocity *= np.float32(fec.momentum)
            velocity += gradient
            x = velocity
    # An infinity would never leave again.
    for array in {id(velocity): velocity, id(x): x}.values():
        np.clip(array, -_LARGEST_STEP, _LARGEST_STEP, out=array)
    return x


def _clipped(arrays, norm: float):
    """``arrays`` scaled down where their norm together is larger than ``norm``."""
    found = math.hypot(*(_norm(array) for array in arrays))
    if found <= norm:
        return arrays
    return [(array.astype(np.float32) * np.float32(norm / found)) for array in arrays]


class _SumCompressor(BatchCompressor):
    """Ternary values that are added up while they are packed.

    Two collectives an exchange. First a small table in which every rank says whether it takes
    part, with which settings, and what its tensors look like: from it all ranks choose the same
    scales, and agree to fail or to skip a tensor before anything has left a residual. Then the
    words, in a ring or, for few ranks, gathered.
    """

    def __init__(self, error_feedback: bool, min_size: int, process_set: Any) -> None:
        super().__init__(error_feedback, min_size, process_set)
        self._steps: Dict[str, int] = {}
        self._steps_lock = threading.Lock()

    def reset(self) -> None:
        super().reset()
        self._steps.clear()

    def state_dict(self) -> dict:
        """As for all compressors; the steps of each exchange, which stochastic rounding draws by,
        under ``"steps"``."""
        with self._steps_lock:
            return {**super().state_dict(), "steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping) -> None:
        """As for all compressors."""
        super().load_state_dict(state)
        with self._steps_lock:
            self._steps = {label: int(steps) for label, steps in state["steps"].items()}

    def _next_step(self, label: str) -> int:
        with self._steps_lock:
            step = self._steps.get(label, 0)
            self._steps[label] = step + 1
        return step

    @abstractmethod
    def _choose(self, survey: Survey) -> "_Scale":
        """The scale of a tensor that looks like this over all ranks, and is finite."""

    def _pack(self, codec, array, scale, words, name, seed) -> int:
        """Pack one tensor into ``words``; returns how many values are not zero."""
        if not self.error_feedback or name is None:
            return codec.encode(array, *scale, words)
        with self.residuals.use(name, array.size) as residual:
            return codec.encode(array, *scale, words, residual)

    def _survey(self, name, array) -> Survey:
        if not self.error_feedback or name is None:
            return survey(array)
        with self.residuals.use(name, array.size) as residual:
            return survey(array, residual)

    def _scale(self, survey: Survey) -> Optional["_Scale"]:
        """None where a rank has values that are not finite."""
        if not (math.isfinite(survey.peak) and math.isfinite(survey.rms)):
            return None
        return self._choose(survey)

    @staticmethod
    def _gathers(table) -> bool:
        # Horovod refuses to gather while a rank has joined.
        return table.complete and gathers(table.ranks)

    def _build(self, ex):
        settings = {"compressor": type(self).__name__, **self.get_config()}
        mark = fingerprint(settings, [tuple(tensor.shape) for tensor in ex.tensors])
        failure: List[Exception] = []

        def look(names, *arrays):
            rank, ranks = ex.process_set.rank(), ex.process_set.size()
            failure.clear()  # of a step whose collectives failed
            try:
                surveys = each([partial(self._survey, *a) for a in zip(names, arrays)], ex.sizes)
            except Exception as error:  # raised by encode, when all ranks know
                failure[:] = [error]
                return failed_row(rank, ranks, len(arrays))
            return row(rank, ranks, mark, ex.probe, surveys)

        def read_table(table):
            table = read(table, ex.process_set.size(), len(ex.tensors))
            codec = TernaryCodec(1 if self._gathers(table) else table.ranks)
            cuts = np.cumsum([0, *(codec.words(size) for size in ex.sizes)])
            return table, codec, [self._scale(s) for s in table.surveys], cuts

        def encode(names, table, *arrays):
            if failure:
                raise failure.pop()
            table_bytes = table.nbytes
            table, codec, scales, cuts = read_table(table)
            step = self._next_step(ex.label)
            words = np.zeros(cuts[-1] + 1, np.int64)
            tally = np.zeros((len(arrays), 2), np.int64)
            tally[:, 1] = 8 * np.diff(cuts)

            def pack(i):
                if scales[i] is None:
                    return 0
                part = words[cuts[i] : cuts[i + 1]]
                seed = (hvd.rank(), ex.label, i, step)
                return self._pack(codec, arrays[i], scales[i], part, names[i], seed)

            try:
                tally[:, 0] = each([partial(pack, i) for i in range(len(arrays))], ex.sizes)
            except Exception as error:  # the others wait for the words, and get a mark with them
                failure[:] = [error]
                words[-1] = 1
            self._count(names, arrays, table_bytes + words.nbytes + ex.token_bytes, tally)
            return words, self._gathers(table)

        def decode(names, moved, table, token):
            table, codec, scales, cuts = read_table(table)
            rows = len(table.present) if self._gathers(table) else 1
            if moved.shape != (rows * (cuts[-1] + 1),):
                raise wire.PayloadError(f"{moved.size} words, {rows} x {cuts[-1] + 1} are needed")
            parts = moved.reshape(rows, -1)
            if failure:
                raise failure.pop()
            if parts[:, -1].any():
                raise RuntimeError("the compressor failed on another rank: see its output")
            factor = exchange.factor_of(token, table.probe, len(table.present))
            results = self._buffers.arrays(ex.sizes)

            def unpack(i):
                if scales[i] is None:
                    results[i][:] = np.nan
                else:
                    part = parts[:, cuts[i] : cuts[i + 1]]
                    codec.decode(part, scales[i].step * factor, results[i])

            each([partial(unpack, i) for i in range(len(results))], ex.sizes)
            return ex.cast(results)

        mine = tf.ensure_shape(ex.on_host(look, ex.tensors, tf.int64), [None])
        table = exchange.add_up(mine, ex.name, ex.process_set)
        words, gathered = ex.on_host(encode, [table, *ex.tensors], [tf.int64, tf.bool])
        words = tf.ensure_shape(words, [None])
        moved = tf.cond(
            tf.ensure_shape(gathered, []),
            lambda: exchange.gather(words, f"{ex.name}_gather", ex.process_set),
            lambda: exchange.add_up(words, f"{ex.name}_sum", ex.process_set),
        )
        return ex.on_host(decode, [moved, table, ex.token], ex.dtypes, "decode")


class _Scale(NamedTuple):
    """What a tensor's digits stand for, and the smallest magnitude that gets one."""

    step: float
    level: float


_NOTHING = _Scale(0.0, math.inf)
_SMALLEST_STEP = 2.0**-100
"""Smaller steps are zero in all but name, and 2**-24 of them is not a normal float32."""
_LARGEST_STEP = float(np.finfo(np.float32).max)


class Ternary(_SumCompressor):
    """Send every value as -1, 0 or 1 times a scale that all ranks share.

    The values of all ranks are added up while they are packed, as many to a 64-bit word as the
    number of ranks allows: 13.5 times smaller than float32 for 2 ranks, 7.5 times for 8. Give an
    instance to Horovod as ``compression=``; see :class:`FEC` for what holds for all compressors.

    Args:
        rounding: ``"threshold"`` sends sign(v) where |v| is at least half the scale, and keeps
            what that lacks as a residual for the next step. ``"stochastic"`` sends sign(v) with
            probability |v| / scale and keeps nothing (TernGrad, Wen et al. 2017, arXiv
            1705.07878); the scale is the largest |v| over all ranks, so that the mean of what is
            sent is v. The default is the rule whose accuracy stayed closest to uncompressed
            training over five runs on MNIST (docs/benchmarks.md).
        sparsity: of the threshold rule: scale over the largest |v|, above 0 and below 2, like the
            sparsity multiplier of 3LC (Lim et al. 2018, arXiv 1802.07389), which is 1 and more.
            Smaller sends more and smaller values.
        clip_sigma: of the stochastic rule: clip values at this many root mean squares (2.5 in the
            paper), for less noise; None for no clipping and no bias.
        seed: of the stochastic rule: draws depend on it, the rank, the tensor and the step.
        min_size: tensors of fewer elements go through Horovod uncompressed, as do integer tensors
            and tensors whose size is not known when the graph is built.
        process_set: exchange in this process set; by default in the one that Horovod reduces in.

    If a value on any rank is NaN or infinite, the whole tensor is NaN on all ranks in that step,
    and no rank's residual changes.

    Raises:
        ValueError: an argument is out of range; in use, an op other than Sum or Average, a
            process set that is not Horovod's, or more than 16383 ranks.
        RuntimeError: in use, ranks that differ in their settings or tensors.
    """

    def __init__(
        self,
        rounding: str = "threshold",
        sparsity: float = 0.25,
        clip_sigma: Optional[float] = None,
        seed: int = 0,
        min_size: int = 1024,
        process_set: Optional[hvd.ProcessSet] = None,
    ) -> None:
        if rounding not in ("threshold", "stochastic"):
            raise ValueError(f"rounding must be 'threshold' or 'stochastic', not {rounding!r}")
        if not _is_number(sparsity) or not 0 < sparsity < 2:
            raise ValueError(f"sparsity must be above 0 and below 2, not {sparsity!r}")
        if clip_sigma is not None and not (_is_number(clip_sigma) and 0 < clip_sigma < math.inf):
            raise ValueError(f"clip_sigma must be None or a positive number, not {clip_sigma!r}")
        if not _is_number(seed) or int(seed) != seed:
            raise ValueError(f"seed must be an integer, not {seed!r}")
        super().__init__(rounding == "threshold", min_size, process_set)
        self.rounding, self.sparsity = rounding, float(sparsity)
        self.clip_sigma = None if clip_sigma is None else float(clip_sigma)
        self.seed = int(seed)

    def get_config(self) -> dict:
        """The settings, without the process set."""
        return {
            "rounding": self.rounding,
            "sparsity": self.sparsity,
            "clip_sigma": self.clip_sigma,
            "seed": self.seed,
            "min_size": self.min_size,
        }

    def _choose(self, survey):
        step = survey.peak
        if self.rounding == "threshold":
            step *= self.sparsity
        elif self.clip_sigma is not None:
            step = min(step, self.clip_sigma * survey.rms)
        if step < _SMALLEST_STEP:
            return _NOTHING
        step = float(np.float32(min(step, _LARGEST_STEP)))
        return _Scale(step, step / 2)

    def _pack(self, codec, array, scale, words, name, seed):
        if self.rounding == "threshold":
            return super()._pack(codec, array, scale, words, name, seed)
        if scale is _NOTHING:
            return 0
        text = repr((self.seed, *seed)).encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return codec.draw(array, scale.step, key, words)


class TwoBit(_SumCompressor):
    """MXNet's 2-bit compression: send plus or minus a fixed threshold, keep the rest.

    The residual grows by the gradient. Where it reaches ``threshold`` the threshold is sent and
    taken off, where it reaches ``-threshold`` the same with the other sign; elsewhere 0 is sent.
    Values travel as in :class:`Ternary`, which also says what else holds.

    Args:
        threshold: a positive number, in the order of the larger gradients: a value many times
            larger takes as many steps to go out, a far smaller one waits long for its turn.
        min_size: tensors of fewer elements go through Horovod uncompressed.
        process_set: exchange in this process set; by default in the one that Horovod reduces in.

    Raises:
        ValueError, RuntimeError: as for :class:`Ternary`.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        min_size: int = 1024,
        process_set: Optional[hvd.ProcessSet] = None,
    ) -> None:
        if not _is_number(threshold) or not _SMALLEST_STEP <= threshold <= _LARGEST_STEP:
            raise ValueError(f"threshold must be a positive float32, not {threshold!r}")
        super().__init__(True, min_size, process_set)
        self.threshold = float(np.float32(threshold))

    def get_config(self) -> dict:
        """The settings, without the process set."""
        return {"threshold": self.threshold, "min_size": self.min_size}

    def _choose(self, survey):
        return _Scale(self.threshold, self.threshold)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class _CompressionMeta(type):
    """Makes each compressor with its default settings once for the whole process."""

    _made: Dict[type, BatchCompressor] = {}

    def _default(cls, kind):
        if kind not in cls._made:
            cls._made[kind] = kind()
        return cls._made[kind]

    fec = property(lambda cls: cls._default(FEC))
    ternary = property(lambda cls: cls._default(Ternary))
    twobit = property(lambda cls: cls._default(TwoBit))


class Compression(metaclass=_CompressionMeta):
    """The compressors by name, in the manner of ``hvd.Compression``."""

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
