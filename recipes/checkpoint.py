"""Checkpoints: one file, replaced as a whole, so that a kill leaves the old or the new one, and
beside it the files of the residuals, of which those that belong to either are there."""

import json
import os
import zipfile
from pathlib import Path

import horovod.tensorflow.keras as hvd
import numpy as np
from horovod.tensorflow import grouped_allreduce
from tensorflow import keras

from hvd_fec.callbacks import CompressorCheckpoint
from hvd_fec.checkpoint import CheckpointError

FILE, RESIDUALS = "checkpoint.npz", "residuals"


class Saver(keras.callbacks.Callback):
    """Writes a checkpoint after every epoch, and every `every` steps if given.

    Rank 0 writes the model, the optimizer and the step, every rank what its
    compressor still holds back. The order of the data needs nothing more, as it
    follows from seed, epoch and step. A loss scale is not saved: it starts anew.

    `training` is a dict of what has to be the same for a resume to make sense,
    `compressor` one of hvd_fec or None.
    """

    def __init__(self, folder, training, every=None, compressor=None):
        super().__init__()
        self.path = Path(folder) / FILE
        self._residuals = compressor and CompressorCheckpoint(compressor, Path(folder) / RESIDUALS)
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
        """Write the checkpoint. All ranks must call this together."""
        average_statistics(model)  # of which the file has one set for all ranks
        if self._residuals:
            self._residuals.set_model(model)
            self._residuals.save()
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

    def restore_residuals(self, model):
        """Restore what goes with rank 0's model, once that has been restored.

        All ranks must call this together. Returns whether there was something
        that fits; a warning says why not. Raises CheckpointError on all ranks.
        """
        if not self._residuals:
            return False
        self._residuals.set_model(model)
        return self._residuals.restore()

    def restore(self, model):
        """Load the checkpoint, if there is one, into a model whose optimizer has been built.

        Returns the number of steps behind it, else 0. Raises CheckpointError.
        """
        if not self.path.exists():
            return 0
        try:
            # Opened here, as np.load leaves a torn file open.
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as saved:
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


def average_statistics(model):
    """Set batch normalization's moving averages to their mean over ranks.

    They are the only weights that ranks do not share: each has seen its own batches.
    """
    own = [
        variable
        for layer in model.submodules
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
    if own and hvd.size() > 1:
        for variable, mean in zip(own, grouped_allreduce([v.value() for v in own])):
            variable.assign(mean)
