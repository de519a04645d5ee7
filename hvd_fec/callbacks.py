"""Keras callbacks: proof that the replicas are equal, checkpoints of residuals, and metrics of the
compression."""

import hashlib
import re
import warnings
from collections import Counter
from numbers import Integral
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object, broadcast_object
from tensorflow import keras

from hvd_fec import checkpoint
from hvd_fec.batching import BatchCompressor
from hvd_fec.stats import Totals

_DIGEST_BYTES = 16
_LISTED = 10  # variables that an error message names
_SAVED = re.compile(r"step-(\d+)-rank-(\d+)-of-(\d+)\.npz")


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


class CompressorCheckpoint(keras.callbacks.Callback):
    """Save each rank's residuals when the model is saved, and restore them when training goes on.

    Every rank writes files of its own, ``step-K-rank-R-of-N.npz``, each replaced as a whole, and
    keeps those of the two newest steps: whenever the job is killed, the model on disk finds the
    residuals of its own step there. K is the optimizer's ``iterations``.

    Put it on every rank, before the callback that saves the model, with the same ``save_freq``:
    when that saves, all ranks have written their residuals. Load the model with its optimizer on
    every rank before ``fit``. Before the first step the callback then restores the residuals of the
    model's step, on all ranks or on none::

        callbacks = [CompressorCheckpoint(compressor, "run/residuals")]
        if hvd.rank() == 0:
            callbacks.append(
                keras.callbacks.ModelCheckpoint("run/epoch-{epoch}", save_weights_only=True)
            )
        newest, epoch = tf.train.latest_checkpoint("run"), 0
        if newest:
            model.load_weights(newest)
            epoch = int(newest.split("-")[-1])
        model.fit(..., initial_epoch=epoch, callbacks=callbacks)

    When not every rank has a file of that step, number of ranks and compressor, all start with
    empty residuals, and each says so in a RuntimeWarning. Tensors that the files do not know, as
    after a change of the model, start with empty ones too, with a warning.

    Args:
        compressor: the object that the optimizer was given as ``compression=``.
        folder: for the files; is made. Not every rank needs to see the same one.
        save_freq: ``"epoch"``, or a number of batches, counted as ``ModelCheckpoint`` does.

    Raises:
        TypeError: ``compressor`` has no state, as those of Horovod itself.
        ValueError: ``save_freq`` is neither ``"epoch"`` nor a positive integer.
        OSError: from training, on all ranks: a rank cannot write its file.
        CheckpointError: from training, on all ranks: a file is damaged, or none of hvd_fec.
    """

    def __init__(
        self,
        compressor: BatchCompressor,
        folder: Union[str, Path],
        save_freq: Union[str, int] = "epoch",
    ) -> None:
        super().__init__()
        if not hasattr(compressor, "state_dict"):
            raise TypeError(
                f"{compressor!r} has no state to save: give CompressorCheckpoint the hvd_fec "
                "compressor that the optimizer has, such as hvd_fec.FEC()"
            )
        if save_freq != "epoch" and not (isinstance(save_freq, Integral) and save_freq > 0):
            raise ValueError(f"save_freq must be 'epoch' or a positive integer, not {save_freq!r}")
        self.compressor = compressor
        self.folder = Path(folder)
        self.save_freq = save_freq
        self._begun = False
        self._unsaved = 0  # batches

    def on_epoch_begin(self, epoch: int, logs: Optional[dict] = None) -> None:
        self._batch = -1
        if not self._begun:  # not in on_train_begin: a later callback may load the model there
            self._begun = True
            self.restore()

    def on_train_batch_end(self, batch: int, logs: Optional[dict] = None) -> None:
        self._unsaved += batch - self._batch
        self._batch = batch
        if isinstance(self.save_freq, Integral) and self._unsaved >= self.save_freq:
            self._unsaved = 0
            self.save()

    def on_epoch_end(self, epoch: int, logs: Optional[dict] = None) -> None:
        if self.save_freq == "epoch":
            self.save()

    def save(self) -> None:
        """Save now. All ranks must call this together; when it returns, all have saved.

        Raises:
            OSError: as the class says.
        """
        step, rank, ranks = self._step(), hvd.rank(), hvd.size()
        problem = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save(self._path(step), self.compressor, rank, ranks, step)
        except OSError as error:
            problem = str(error)
        self._raise(OSError, allgather_object(problem, name="hvd_fec_saved"))
        # Those of other numbers of ranks have nobody else to remove them.
        files = {p: s for p, s, r, n in self._files() if r == rank or n != ranks}
        before = max((s for s in files.values() if s < step), default=step)
        for path, saved in files.items():
            if saved not in (step, before):
                path.unlink(missing_ok=True)

    def restore(self) -> bool:
        """Restore now, if there is something. All ranks must call this together.

        Returns:
            Whether the ranks have restored.

        Raises:
            CheckpointError: as the class says.
        """
        step = self._step()
        state = damage = lack = None
        try:
            state, saved = checkpoint.read(
                self._path(step), self.compressor, hvd.rank(), hvd.size()
            )
            if saved != step:
                lack = f"{self._path(step)}: is of step {saved}, not {step}"
        except FileNotFoundError:
            others = sorted({(s, n) for _, s, _, n in self._files()})
            there = ", ".join(f"step {s} of {n} ranks" for s, n in others) or "nothing"
            if others or step:
                lack = f"there is no {self._path(step)}; the folder has {there}"
        except checkpoint.MismatchError as error:
            lack = str(error)
        except checkpoint.CheckpointError as error:
            damage = str(error)
        outcome = damage, lack, state is not None
        damages, lacks, found = zip(*allgather_object(outcome, name="hvd_fec_found"))
        self._raise(checkpoint.CheckpointError, damages)
        if state is not None and all(found) and not any(lacks):
            self.compressor.load_state_dict(state)
            return True
        if any(lacks):
            warnings.warn(
                f"the model is at step {step}, and its residuals are not restored, on no rank: "
                f"{_by_rank(lacks)}",
                RuntimeWarning,
                stacklevel=2,
            )
        return False

    def _step(self) -> int:
        # Of rank 0, whose model the others may not have got yet.
        return broadcast_object(int(self.model.optimizer.iterations), 0, name="hvd_fec_step")

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}-rank-{hvd.rank()}-of-{hvd.size()}.npz"

    def _files(self) -> List[Tuple[Path, int, int, int]]:
        """(path, step, rank, ranks) of every file in the folder."""
        found = ((path, _SAVED.fullmatch(path.name)) for path in self.folder.glob("*.npz"))
        return [(path, int(m[1]), int(m[2]), int(m[3])) for path, m in found if m]

    @staticmethod
    def _raise(kind, problems: Sequence[Optional[str]]) -> None:
        """The same error on all ranks, if one has a problem: none is left waiting."""
        if any(problems):
            raise kind(_by_rank(problems))


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


def _by_rank(texts: Sequence[Optional[str]]) -> str:
    """``rank 1: ...``, of the first rank that has a text, and how many more have one."""
    ranks = [rank for rank, text in enumerate(texts) if text]
    more = f" (and {len(ranks) - 1} more ranks)" * (len(ranks) > 1)
    return f"rank {ranks[0]}: {texts[ranks[0]]}{more}"


def _ranks(ranks: List[int]) -> str:
    listed = ", ".join(map(str, ranks[:_LISTED])) + ", ..." * (len(ranks) > _LISTED)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
