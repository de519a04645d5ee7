"""Keras callbacks."""

import hashlib
from collections import Counter
from typing import Dict, List

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object
from tensorflow import keras

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

    def __init__(self, every: int = 100, process_set=hvd.global_process_set):
        super().__init__()
        if int(every) != every or every < 1:
            raise ValueError(f"every must be a positive integer, not {every!r}")
        self.every = int(every)
        self.process_set = process_set
        self._steps = self._checked = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._batch = -1

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution Keras calls only after several batches.
        self._steps += batch - self._batch
        self._batch = batch
        if self._steps - self._checked >= self.every:
            self.check()

    def on_train_end(self, logs=None):
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
    digest = hashlib.blake2b(value.reshape(-1).view(np.uint8), digest_size=_DIGEST_BYTES)
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
