"""ReplicaCheck on models that agree, and on models that do not."""

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
from tensorflow import keras

import hvd_fec
from hvd_fec.callbacks import ReplicaCheck, ReplicaError

RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1
STEPS = 12


def build(norm=False):
    """Ranks start from different weights: only the broadcast makes them equal."""
    keras.utils.set_random_seed(RANK)
    layers = [keras.layers.Dense(64, name="first"), keras.layers.Dense(3, name="second")]
    if norm:
        layers.insert(1, keras.layers.BatchNormalization(name="norm"))
    model = keras.Sequential([keras.layers.Input((32,)), *layers])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), compression=hvd_fec.FEC(-9), groups=1
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model, *callbacks, **kwargs):
    rng = np.random.default_rng(RANK)
    x, y = rng.standard_normal((8 * STEPS, 32), np.float32), rng.integers(3, size=8 * STEPS)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[broadcast, *callbacks], **kwargs)


class Spoil(keras.callbacks.Callback):
    """Alter one element of a variable on the last rank after ``step`` steps."""

    def __init__(self, step, variable):
        super().__init__()
        self.step, self.variable, self.done = step, variable, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if RANK == LAST and self.done == self.step:
            value = self.variable().numpy()
            value.flat[0] += 1e-3  # a last bit may be rounded away again by the next update
            self.variable().assign(value)


class Count(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


@pytest.mark.parametrize("norm", [False, True])
def test_replicas_agree(norm):
    """With batch normalization too, whose moving averages differ between ranks."""
    model = build(norm)
    fit(model, ReplicaCheck(every=1), epochs=2)


@pytest.mark.parametrize(
    "variable, name",
    [
        (lambda m: m.layers[0].kernel, "first/kernel:0"),
        (lambda m: m.layers[1].bias, "second/bias:0"),
        (lambda m: m.optimizer.variables()[-1], "second"),
    ],
    ids=["kernel", "bias", "momentum"],
)
def test_an_altered_variable_is_named_within_the_period(variable, name):
    model, count = build(), Count()
    with pytest.raises(ReplicaError) as caught:
        fit(model, Spoil(6, lambda: variable(model)), count, ReplicaCheck(every=5))
    assert count.steps == 10
    message = str(caught.value)
    assert "after 10 steps" in message
    culprit = f"rank {LAST} differs from the others" if SIZE > 2 else "rank 0 and rank 1 differ"
    line = next(line for line in message.splitlines() if name in line)
    assert line.endswith(culprit)


def test_end_of_training_is_checked():
    model = build()
    with pytest.raises(ReplicaError, match=f"after {STEPS} steps"):
        fit(model, Spoil(STEPS, lambda: model.layers[0].kernel), ReplicaCheck(every=1000))


def test_several_steps_per_execution():
    model, count = build(), Count()
    model.steps_per_execution = 4
    with pytest.raises(ReplicaError, match="after 8 steps"):
        fit(model, Spoil(1, lambda: model.layers[0].kernel), count, ReplicaCheck(every=5))


def test_process_set(even):
    """Ranks outside of the set train something else and take no part."""
    model = build()
    check = ReplicaCheck(process_set=even)
    check.set_model(model)
    model.layers[0].kernel.assign(np.full((32, 64), RANK % 2))
    for variable in model.weights[1:]:
        variable.assign(np.zeros(variable.shape))
    check.check()


def test_missing_variable_is_named():
    model = keras.Sequential([keras.layers.Dense(2, name="extra" if RANK else "same")])
    model.build((None, 3))
    check = ReplicaCheck()
    check.set_model(model)
    with pytest.raises(ReplicaError, match="extra/kernel:0"):
        check.check()


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_period_must_be_positive(every):
    with pytest.raises(ValueError, match="every must be a positive integer"):
        ReplicaCheck(every=every)
