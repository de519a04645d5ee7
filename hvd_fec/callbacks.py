"""Keras callbacks: proof that the replicas are equal, and metrics of the compression."""

import hashlib
from collections import Counter
from typing import Dict, List, Optional

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object
from tensorflow import keras

from hvd_fec.batching import BatchCompressor
from hvd_fec.stats import Totals

_DIGEST_BYTES = 16
_LISTED = 10  # variables that an error message names


class ReplicaError(RuntimeError):
    """The ranks train different models."""


class ReplicaCheck(keras.callbacks.Callback):
    """Check while training that all ranks have the same model, to the last bit.

    Data-parallel training exchanges gradients only. That is enough as long as every rank starts
    from the same weights and applies the same updates; when one does not, nothing fails, the model
    just gets worse. This callback makes it fail: every ``every`` steps, and at the end of
    training, each rank hashes its weights and the ranks compare the hashes, 16 bytes each. Only
    when these differ are the variables compared one by one.

    Compared are all weights of the model and the variables of its optimizer, except for the moving
    averages of ``BatchNormalization`` layers: every rank computes those from its own batches, so
    they differ by design.

    Put it after ``BroadcastGlobalVariablesCallback``, which makes the weights equal after the
    first step::

        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), ReplicaCheck(every=100)]

    Args:
        every: steps between checks. The hashes take about a millisecond per megabyte of weights.
        process_set: the ranks that train this model together; by default all.

    Raises:
        ValueError: ``every`` is not a positive integer.
        ReplicaError: from training, on all ranks: which variables differ, and on which ranks.
    """

    def __init__(
        self, every: int = 100, process_set: hvd.ProcessSet = hvd.global_process_set
    ) -> None:
        super().__init__()
        if int(every) != every or every < 1:
            raise ValueError(f"every must be a positive integer, not {every!r}")
        self.every = int(every)
        self.process_set = process_set
        self._steps = self._checked = 0

    def on_epoch_begin(self, epoch: int, logs: Optional[dict] = None) -> None:
        self._batch = -1

    def on_train_batch_end(self, batch: int, logs: Optional[dict] = None) -> None:
        # With steps_per_execution Keras calls only after several batches.
        self._steps += batch - self._batch
        self._batch = batch
        if self._steps - self._checked >= self.every:
            self.check()

    def on_train_end(self, logs: Optional[dict] = None) -> None:
        if self._steps > self._checked:
            self.check()

    def check(self) -> None:
        """Compare now. All ranks of the process set must call this together.

        Raises:
            ReplicaError: as the class says.
        """
        self._checked = self._steps
        if not self.process_set.included() or self.process_set.size() == 1:
            return
        digests = {name: _digest(v) for name, v in _variables(self.model).items()}
        whole = hashlib.blake2b(repr(digests).encode(), digest_size=_DIGEST_BYTES).digest()
        everyone = hvd.allgather(
            tf.constant([np.frombuffer(whole, np.uint8)]),
            name="hvd_fec_replica_check",
            process_set=self.process_set,
        ).numpy()
        # Every rank sees the same digests, so all of them go on here or none does.
        if (everyone != everyone[0]).any():
            replicas = allgather_object(digests, process_set=self.process_set)
            raise ReplicaError(_explain(replicas, self.process_set.ranks, self._steps))


class CompressionMetrics(keras.callbacks.Callback):
    """Put what a compressor does into the logs of ``model.fit``.

    Whatever shows logs then shows these as well: the progress bar, ``CSVLogger``, ``TensorBoard``
    (as ``epoch_ratio`` and so on) and the history. They are of this rank, for each batch since the
    one before, for each epoch over all of it:

    ==============  ==============================================================================
    ``ratio``       gradient bytes over bytes sent
    ``density``     share of the compressed tensors' values that were sent
    ``sent_mb``     MB (a million bytes) sent in a step
    ``residual``    norm of all residuals over that of all gradients, when last sampled
    ``encode_ms``   host time of a step before its last collective, in milliseconds
    ``exchange_ms`` time in collectives, waiting for the slowest rank included
    ``decode_ms``   host time after the last collective
    ==============  ==============================================================================

    Put it before the callbacks that are to see them, and on every rank: Horovod's
    ``MetricAverageCallback`` averages all logs, and all ranks must have the same ones::

        compressor = hvd_fec.FEC()
        ...
        metrics = CompressionMetrics(compressor)
        model.fit(..., callbacks=[metrics, keras.callbacks.CSVLogger("log.csv")])
        print(metrics.table())

    Args:
        compressor: the object that the optimizer was given as ``compression=``.
        sample_every: steps between samples of the norms, which take about as long as one addition
            of the gradients.

    Raises:
        TypeError: ``compressor`` keeps no statistics, as those of Horovod itself.
        ValueError: ``sample_every`` is not a positive integer.
    """

    def __init__(self, compressor: BatchCompressor, sample_every: int = 10) -> None:
        super().__init__()
        if not hasattr(compressor, "stats"):
            raise TypeError(
                f"{compressor!r} keeps no statistics: give CompressionMetrics the hvd_fec "
                "compressor that the optimizer has, such as hvd_fec.FEC()"
            )
        if int(sample_every) != sample_every or sample_every < 1:
            raise ValueError(f"sample_every must be a positive integer, not {sample_every!r}")
        self.compressor = compressor
        self.sample_every = int(sample_every)
        self._supports_tf_logs = True  # it only adds to them

    def on_train_begin(self, logs: Optional[dict] = None) -> None:
        self._sampled_at = None
        self._epoch = self._batch = self.compressor.stats.totals()
        self._sample(self._batch.steps)

    def on_epoch_begin(self, epoch: int, logs: Optional[dict] = None) -> None:
        self._epoch = self._batch = self.compressor.stats.totals()
        self._shown = self._values(Totals())

    def on_train_batch_end(self, batch: int, logs: Optional[dict] = None) -> None:
        now = self.compressor.stats.totals()
        window = now.since(self._batch)
        if window.steps:  # with backward_passes_per_step not every batch has an exchange
            self._batch, self._shown = now, self._values(window)
            self._sample(now.steps)
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Optional[dict] = None) -> None:
        if logs is not None:
            logs.update(self._values(self.compressor.stats.totals().since(self._epoch)))

    def _sample(self, steps):
        if self._sampled_at is None or not 0 <= steps - self._sampled_at < self.sample_every:
            self._sampled_at = steps
            self.compressor.stats.sample_norms()

    def _values(self, window: Totals) -> Dict[str, float]:
        steps = max(1, window.steps)
        return {
            "ratio": window.ratio,
            "density": window.density,
            "sent_mb": window.bytes_sent / 1e6 / steps,
            "residual": self.compressor.stats.residual_norm,
            "encode_ms": 1e3 * window.encode / steps,
            "exchange_ms": 1e3 * window.exchange / steps,
            "decode_ms": 1e3 * window.decode / steps,
        }

    def table(self) -> str:
        """A line for each compressed tensor, those that send most bytes first.

        ``residual`` is the norm of its residual over that of its gradient, when last sampled.
        """
        tensors = self.compressor.stats.tensors()
        rows = [["tensor", "values", "density", "ratio", "kB per step", "residual"]]
        for key, t in sorted(tensors.items(), key=lambda item: -item[1].bytes_sent):
            residual = t.residual_norm / t.gradient_norm if t.gradient_norm else float("nan")
            kilobytes = t.bytes_sent / 1e3 / max(1, t.calls)
            numbers = f"{t.size:,} {t.density:.3%} {t.ratio:.1f} {kilobytes:.2f} {residual:.2f}"
            rows.append([str(key), *numbers.split()])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )


def _variables(model) -> Dict[str, tf.Variable]:
    """What must be equal on all ranks, by names that are the same on all ranks."""
    local = {
        variable.ref()
        for layer in model.submodules
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built
        for variable in (layer.moving_mean, layer.moving_variance)
    }
    variables = list(model.weights)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables()
    named: Dict[str, tf.Variable] = {}
    for variable in variables:
        if variable.ref() in local:
            continue
        name, copy = variable.name, 1
        while name in named:  # Keras does not insist on different names
            copy += 1
            name = f"{variable.name} ({copy})"
        named[name] = variable
    return named


def _digest(variable: tf.Variable) -> bytes:
    value = np.ascontiguousarray(variable.numpy())
    # As bytes: bfloat16 offers no buffer. Shape and type belong to what must agree.
    digest = hashlib.blake2b(value.reshape(-1).view(np.uint8).data, digest_size=_DIGEST_BYTES)
    digest.update(f"{value.dtype} {value.shape}".encode())
    return digest.digest()


def _explain(replicas: List[Dict[str, bytes]], ranks: List[int], steps: int) -> str:
    names = list(dict.fromkeys(name for replica in replicas for name in replica))
    lines = []
    for name in names:
        digests = [replica.get(name) for replica in replicas]
        if len(set(digests)) > 1:
            lines.append(f"  {name}: {_who(digests, ranks)}")
    if not lines:
        lines.append("  the variables are the same, but in another order")
    differing = len(lines)
    if differing > _LISTED:
        lines[_LISTED:] = [f"  ... and {differing - _LISTED} more"]
    return "\n".join(
        [
            f"after {steps} steps the ranks have different values in {differing} of "
            f"{len(names)} variables:",
            *lines,
            "Weights stay equal when they start equal (BroadcastGlobalVariablesCallback, or "
            "hvd.broadcast_variables) and nothing but reduced gradients changes them.",
        ]
    )


def _who(digests: List, ranks: List[int]) -> str:
    """Which ranks are apart: from the majority, or, without one, from each other."""
    common, count = Counter(digests).most_common(1)[0]
    if 2 * count > len(digests):
        apart = [rank for rank, digest in zip(ranks, digests) if digest != common]
        return f"{_ranks(apart)} differ{'s' * (len(apart) == 1)} from the others"
    groups: Dict = {}
    for rank, digest in zip(ranks, digests):
        groups.setdefault(digest, []).append(rank)
    return " and ".join(_ranks(group) for group in groups.values()) + " differ"


def _ranks(ranks: List[int]) -> str:
    listed = ", ".join(map(str, ranks[:_LISTED])) + ", ..." * (len(ranks) > _LISTED)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
