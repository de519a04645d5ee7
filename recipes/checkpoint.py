"""Checkpoints: one file, replaced as a whole, so that a kill leaves the old or the new one."""

import json
import os
import zipfile
from pathlib import Path

import horovod.tensorflow.keras as hvd
import numpy as np
from tensorflow import keras

FILE = "checkpoint.npz"


class CheckpointError(Exception):
    """A checkpoint is damaged or of another training; the text is meant for the user."""


class Saver(keras.callbacks.Callback):
    """Writes a checkpoint on rank 0 after every epoch, and every `every` steps if given.

    It holds the model, the optimizer and the step. The order of the data needs
    nothing more, as it follows from seed, epoch and step. Not in it are what a
    compressor still holds back and a loss scale: they start anew.

    `training` is a dict of what has to be the same for a resume to make sense.
    """

    def __init__(self, folder, training, every=None):
        super().__init__()
        self.path = Path(folder) / FILE
        # As it will be read again.
        self._training = json.loads(json.dumps(training))
        self._every = every
        self.step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        end_of_epoch = self.step % self._training["steps"] == 0
        if end_of_epoch or self._every and self.step % self._every == 0:
            self.save(self.model)

    def save(self, model):
        """Write the checkpoint, if this is rank 0."""
        if hvd.rank() != 0:
            return
        meta = {"step": self.step, "training": self._training}
        arrays = {str(i): v.numpy() for i, v in enumerate(variables(model))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name("." + FILE)
        with open(fresh, "wb") as stream:
            np.savez(stream, meta=np.array(json.dumps(meta)), **arrays)
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut could leave the new name and no bytes
        os.replace(fresh, self.path)

    def restore(self, model):
        """Load the checkpoint, if there is one, into a model whose optimizer has been built.

        Returns the number of steps behind it, else 0. Raises CheckpointError.
        """
        if not self.path.exists():
            return 0
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                meta = json.loads(str(saved["meta"]))
                arrays = [saved[str(i)] for i in range(len(saved.files) - 1)]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self.path}: damaged ({error})") from error
        then = meta["training"]
        if then != self._training:
            keys = sorted({*then, *self._training})
            changed = [k for k in keys if then.get(k) != self._training.get(k)]
            said = ", ".join(f"{k} {then.get(k)}, not {self._training.get(k)}" for k in changed)
            raise CheckpointError(f"{self.path}: is of a training with {said}")
        targets = variables(model)
        if [a.shape for a in arrays] != [tuple(v.shape) for v in targets]:
            raise CheckpointError(f"{self.path}: is of another model")
        for variable, array in zip(targets, arrays):
            variable.assign(array)
        return meta["step"]


def variables(model):
    """All variables of the model and its built optimizer, in the same order in every run."""
    optimizer = model.optimizer
    found = [*model.variables, *optimizer.variables()]
    if hasattr(optimizer, "inner_optimizer"):  # loss scaling counts for itself only
        found += optimizer.inner_optimizer.variables()
    return list({variable.ref(): variable for variable in found}.values())
