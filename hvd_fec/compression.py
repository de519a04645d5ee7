"""The compressors that Horovod takes as ``compression=``."""

import hashlib
import math
import os
import threading
from abc import abstractmethod
from functools import partial
from numbers import Real
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_fec import exchange, wire
from hvd_fec.batching import BatchCompressor
from hvd_fec.codecs import FecCodec, TernaryCodec
from hvd_fec.codecs.arrays import each
from hvd_fec.codecs.ternary import Survey, gathers, survey
from hvd_fec.cost import two_shot_pays
from hvd_fec.survey import failed_row, fingerprint, read, row


class FEC(BatchCompressor):
    """Fixed-exponential compression: send 5 bits of every value whose exponent is large enough.

    Give an instance to ``hvd.DistributedOptimizer``, ``hvd.DistributedGradientTape``,
    ``hvd.allreduce`` or ``hvd.grouped_allreduce`` as ``compression=``. The result is the sum or
    mean over ranks of what the ranks sent, the same to the last bit on every rank; with error
    feedback what was not sent is added to the next gradient of the same variable. The bytes and
    the quantiser are those of :class:`hvd_fec.codecs.FecCodec`.

    Args:
        threshold: keep a value when its magnitude is at least ``2**threshold``; an integer in the
            published scheme, but any number from -126 to 113 will do.
        error_feedback: keep residuals. Without them what is below the threshold is lost.
        min_size: tensors of fewer elements go through Horovod uncompressed, as do integer tensors
            and tensors whose size is not known when the graph is built.
        process_set: exchange in this process set; by default in the one that Horovod reduces in.
        exchange: ``"allgather"`` sends every payload to every rank: exact, and each rank receives
            as many payloads as there are ranks. ``"twoshot"`` has each rank average one slice of
            every tensor and pass the average on, compressed once more with a residual of its own:
            less than two payloads per rank for any number of ranks. ``"auto"`` chooses by
            :func:`hvd_fec.cost.two_shot_pays`.
        form: ``"planes"``, or ``"coded"`` for fewer bytes and more work: see
            :class:`hvd_fec.codecs.FecCodec`. Ranks may differ in it.

    Raises:
        ValueError: an argument is out of range; in use, an op other than Sum or Average, or a
            process set that is not Horovod's.
    """

    def __init__(
        self,
        threshold: float = -9,
        error_feedback: bool = True,
        min_size: int = 1024,
        process_set: Optional[hvd.ProcessSet] = None,
        exchange: str = "auto",
        form: str = "planes",
    ) -> None:
        if exchange not in ("auto", "allgather", "twoshot"):
            raise ValueError(f"exchange must be 'auto', 'allgather' or 'twoshot', not {exchange!r}")
        super().__init__(error_feedback, min_size, process_set)
        self._codec = FecCodec(threshold, form)
        self.exchange = exchange

    @property
    def threshold(self) -> float:
        """Exponent of the smallest kept magnitude."""
        return self._codec.threshold

    def get_config(self) -> dict:
        """The settings, without the process set."""
        return {
            "threshold": self.threshold,
            "form": self._codec.form,
            "error_feedback": self.error_feedback,
            "min_size": self.min_size,
            "exchange": self.exchange,
        }

    def _build(self, ex):
        ranks = ex.process_set.size() if ex.process_set.included() else 1
        # The graph outlives a change of an elastic job's size, and must be the same on all ranks.
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        pays = not elastic and two_shot_pays(ranks, 4 * sum(ex.sizes))
        if self.exchange == "twoshot" or (self.exchange == "auto" and pays):
            return self._build_two_shot(ex)

        def encode(names, *arrays):
            frame, tally = self._encode(names, arrays, ex.probe)
            self._count(names, arrays, frame.nbytes + ex.token_bytes, tally)
            return frame

        def decode(names, gathered, token):
            results = self._buffers.zeros(ex.sizes)
            exchange.decode_frames(gathered, token, self._codec.decode_add, results)
            return ex.cast(results)

        frame = tf.ensure_shape(ex.on_host(encode, ex.tensors, tf.uint8), [None])
        gathered = exchange.gather(frame, ex.name, ex.process_set)
        return ex.on_host(decode, [gathered, ex.token], ex.dtypes, "decode")

    def _build_two_shot(self, ex):
        def scatter(names, *arrays):
            ranks = ex.process_set.size()
            flat = [array.reshape(-1) for array in arrays]
            try:
                # A value that is not finite must leave the whole residual alone, not one slice.
                finite = [self._codec.is_finite(array) for array in flat]
            except Exception as error:  # as in _encode
                finite = error
            frames, tally = [], 0
            for rank in range(ranks):
                share = exchange.share(ex.sizes, rank, ranks)
                frame, counted = self._encode(names, flat, ex.probe, share, finite)
                frames.append(frame)
                tally = tally + counted
            sent = sum(frame.nbytes for frame in frames)
            self._count(names, arrays, sent + ex.token_bytes, tally)
            return np.concatenate(frames), np.array([f.size for f in frames], np.int32)

        def average(names, received):
            rank, ranks = ex.process_set.rank(), ex.process_set.size()
            try:
                frames = wire.split_frames(received)
                share = exchange.share(ex.sizes, rank, ranks)
                means = self._buffers.zeros([piece.stop - piece.start for _, piece in share])
                exchange.add_frames(frames, means, self._codec.decode_add, 1 / ranks)
            except Exception as error:  # as in _encode
                return wire.pack_error(str(error))
            names = [names[i] and f"{names[i]}, mean of {rank}/{ranks}" for i, _ in share]
            # Means of n independent values are sqrt(n) times smaller: this keeps as many of them.
            codec = FecCodec(max(self.threshold - math.log2(ranks) / 2, -126), self._codec.form)
            frame, _ = self._encode(names, means, ex.probe, codec=codec)
            self._stats.add_sent(frame.nbytes)
            return frame

        def decode(names, gathered, token):
            frames = wire.split_frames(gathered)
            factor = exchange.factor_of(token, exchange.mean_probe(frames), 1)
            results = self._buffers.zeros(ex.sizes)
            for rank, frame in enumerate(frames):
                share = exchange.share(ex.sizes, rank, len(frames))
                pieces = [results[i][piece] for i, piece in share]
                exchange.check_frame(rank, frame, [piece.size for piece in pieces])
                exchange.add_frames([frame], pieces, self._codec.decode_add, factor)
            return ex.cast(results)

        frames, splits = ex.on_host(scatter, ex.tensors, [tf.uint8, tf.int32])
        frames, splits = tf.ensure_shape(frames, [None]), tf.ensure_shape(splits, [None])
        received = exchange.scatter(frames, splits, ex.name, ex.process_set)
        frame = tf.ensure_shape(ex.on_host(average, [received], tf.uint8), [None])
        gathered = exchange.gather(frame, f"{ex.name}_gather", ex.process_set)
        return ex.on_host(decode, [gathered, ex.token], ex.dtypes, "decode")

    def _encode(self, names, arrays, probe, share=None, finite=None, codec=None):
        """This rank's frame, and the values and bytes in it of each tensor: of ``arrays``, or of
        a ``share`` of them, where ``finite`` says of each whether all of it is, or why that is
        unknown."""
        if share is None:
            share = [(i, slice(0, array.size)) for i, array in enumerate(arrays)]
        finite = finite or [True] * len(arrays)
        codec = codec or self._codec
        tally = np.zeros((len(arrays), 2), np.int64)
        try:
            if isinstance(finite, Exception):
                raise finite
            calls = [
                partial(self._encode_one, codec, names[i], arrays[i], piece, finite[i])
                for i, piece in share
            ]
            payloads = each(calls, [piece.stop - piece.start for _, piece in share])
        except Exception as error:  # every rank must hear of it, or they wait here forever
            return wire.pack_error(f"{type(error).__name__}: {error}"), tally
        for (i, _), payload in zip(share, payloads):
            tally[i] += wire.read_header(payload).kept, payload.size
        return wire.pack_frame(probe, payloads), tally

    def _encode_one(self, codec, name, array, piece, finite) -> np.ndarray:
        flat = array.reshape(-1)[piece]
        if not self.error_feedback or name is None or not finite:
            return codec.encode(flat)
        with self.residuals.use(name, array.size) as residual:
            return codec.encode(flat, residual[piece])


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
