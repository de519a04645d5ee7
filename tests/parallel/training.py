"""What people do with Keras and Horovod, with a compressor in it.

Most tests train twice, with ``hvd.Compression.none`` and with ``Whole``: FEC around a codec that
sends the gradients as they are. The weights must then be those of ``none``, so everything but the
quantiser is compared with Horovod itself. ``fec.py`` and ``ternary.py`` test the quantisers.
"""

import tempfile

import horovod.keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_fec
from hvd_fec import wire
from hvd_fec.codecs import FecCodec

RANK, SIZE = hvd.rank(), hvd.size()
LR = 0.05


class WholeCodec(FecCodec):
    """float32 values behind the usual header."""

    def encode_counting(self, x, residual=None):
        values = np.asarray(x).astype(np.float32).reshape(-1)
        payload = np.empty(wire.HEADER.size + values.nbytes, np.uint8)
        sections = (values.nbytes, 0, 0)
        kind = wire.DTYPES["float32"]
        wire.Header(1, kind, 0, 0, values.size, values.size, sections).write(payload)
        payload[wire.HEADER.size :] = values.view(np.uint8)
        return payload, values.size

    def decode_add(self, payload, out, scale=1.0):
        out += payload[wire.HEADER.size :].view(np.float32) * np.float32(scale)


class Whole(hvd_fec.FEC):
    """Compresses every tensor, and loses nothing."""

    def __init__(self, min_size=1):
        super().__init__(min_size=min_size)
        self._codec = WholeCodec(0)


def same_everywhere(arrays):
    flat = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays])
    everyone = hvd.allgather(tf.constant(flat[None])).numpy()
    np.testing.assert_array_equal(everyone, np.broadcast_to(flat, everyone.shape))


def layers(outputs=4, hidden=24):
    return [
        keras.layers.Input(16),
        keras.layers.Dense(hidden, "tanh"),
        keras.layers.Dense(outputs),
    ]


def samples(n=32, seed=0):
    x = np.random.default_rng([RANK, seed]).standard_normal((n, 16)).astype(np.float32)
    return x, np.tanh(x[:, :4] * 2)


def sgd(compression, legacy=False, learning_rate=LR, clip=None, **kwargs):
    make = keras.optimizers.legacy.SGD if legacy else keras.optimizers.SGD
    opt = make(learning_rate, momentum=0.9, **(clip or {}))
    return hvd_keras.DistributedOptimizer(opt, compression=compression, **kwargs)


def fit(compression, compile=None, epochs=2, **kwargs):
    model = keras.Sequential(layers())
    model.compile(sgd(compression, **kwargs), "mse", **(compile or {}))
    model.fit(*samples(), 8, epochs, verbose=0, shuffle=False)
    return model


USES = {}


def use(function):
    USES[function.__name__.replace("_", " ")] = function
    return function


@pytest.mark.parametrize("name", USES)
def test_trains_as_without_compression(name):
    weights = []
    for compression in (hvd.Compression.none, Whole()):
        keras.utils.set_random_seed(5)
        trained = USES[name](compression)
        weights.append([np.asarray(w) for w in trained])
        same_everywhere(weights[-1])
    assert compression.stats.steps > 0
    for none, whole in zip(*weights):
        np.testing.assert_allclose(whole, none, rtol=2e-5, atol=2e-6)


# ---- optimizers and model.fit --------------------------------------------------------------------


@use
def plain(compression):
    return fit(compression).get_weights()


@use
def legacy_optimizer(compression):
    return fit(compression, legacy=True).get_weights()


@use
def four_backward_passes(compression):
    return fit(compression, epochs=4, backward_passes_per_step=4, groups=1).get_weights()


@use
def four_backward_passes_averaged(compression):
    return fit(
        compression, backward_passes_per_step=4, average_aggregated_gradients=True
    ).get_weights()


@use
def two_backward_passes_of_a_legacy_optimizer(compression):
    return fit(compression, legacy=True, backward_passes_per_step=2).get_weights()


@use
def clipping_by_value(compression):
    return fit(compression, clip=dict(clipvalue=0.01)).get_weights()


@use
def clipping_by_norm(compression):
    return fit(compression, clip=dict(clipnorm=0.02), groups=1).get_weights()


@use
def clipping_by_global_norm(compression):
    return fit(compression, clip=dict(global_clipnorm=0.05)).get_weights()


@use
def several_steps_per_execution(compression):
    return fit(compression, compile=dict(steps_per_execution=3)).get_weights()


@use
def run_eagerly(compression):
    return fit(compression, compile=dict(run_eagerly=True), epochs=1).get_weights()


@use
def last_batch_smaller(compression):
    model = keras.Sequential(layers())
    model.compile(sgd(compression), "mse")
    model.fit(*samples(19), 8, 3, verbose=0, shuffle=False)
    return model.get_weights()


@use
def sparse_gradients_as_dense(compression):
    return sparse_gradients(compression, sparse_as_dense=True, groups=1)


@use
def sparse_gradients(compression, **kwargs):
    model = keras.Sequential(
        [
            keras.layers.Embedding(50, 8, input_length=4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(sgd(compression, **kwargs), "mse")
    x = np.random.default_rng(RANK).integers(0, 50, (16, 4))
    model.fit(x, np.ones((16, 3)), 8, 3, verbose=0, shuffle=False)
    return model.get_weights()


@use
def layers_frozen_while_training(compression):
    model = keras.Sequential(layers())
    for trainable in ((True, True), (False, True), (True, False), (True, True)):
        for layer, value in zip(model.layers, trainable):
            layer.trainable = value
        model.compile(sgd(compression), "mse")
        model.fit(*samples(), 8, 1, verbose=0, shuffle=False)
    return model.get_weights()


@use
def sync_batch_normalization(compression):
    model = keras.Sequential(layers())
    model.add(hvd.SyncBatchNormalization(axis=-1))
    model.add(keras.layers.Dense(4))
    model.compile(sgd(compression), "mse")
    model.fit(*samples(), 8, 2, verbose=0, shuffle=False)
    return model.get_weights()


@use
def partial_optimizer_with_local_variables(compression):
    model = keras.Sequential(layers())
    local = model.layers[0]
    opt = horovod.keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(LR), compression=compression, local_layers=[local]
    )
    model.compile(opt, "mse")
    model.fit(*samples(), 8, 2, verbose=0, shuffle=False)
    # What is local differs: its sum over ranks must be that of none as well.
    return model.layers[1].get_weights() + [
        hvd.allreduce(tf.constant(w), op=hvd.Sum).numpy() for w in local.get_weights()
    ]


@use
def saved_and_loaded(compression):
    with tempfile.TemporaryDirectory() as folder:
        fit(compression).save(f"{folder}/model.h5")
        model = hvd_keras.load_model(f"{folder}/model.h5", compression=compression)
    model.fit(*samples(seed=1), 8, 2, verbose=0, shuffle=False)
    return model.get_weights()


# ---- loops of one's own --------------------------------------------------------------------------


def loop(compression, steps=4, function=True, **tape_kwargs):
    """Trains a dense model with a tape; a head has no part in the loss."""
    model = keras.Sequential(layers())
    unused = keras.layers.Dense(5)
    unused.build((None, 16))
    variables = model.trainable_variables + unused.trainable_variables
    opt = keras.optimizers.SGD(LR)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **tape_kwargs)
        grads = tape.gradient(loss, variables)
        assert [g is None for g in grads] == [False] * 4 + [True] * 2
        opt.apply_gradients((g, v) for g, v in zip(grads, variables) if g is not None)

    if function:
        step = tf.function(step)
    for i in range(steps):
        step(*map(tf.constant, samples(8 + i % 2, seed=i)))  # two batch sizes: two traces
    return model.get_weights()


@use
def none_gradients_and_retraces(compression):
    return loop(compression)


@use
def none_gradients_in_groups(compression):
    return loop(compression, groups=2)


@use
def none_gradients_eagerly(compression):
    return loop(compression, steps=2, function=False)


@use
def persistent_tape(compression):
    model = keras.Sequential(layers())
    first, last = model.layers
    opt = keras.optimizers.SGD(LR)

    @tf.function
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            out = model(x)
            loss, size = tf.reduce_mean((out - y) ** 2), tf.reduce_mean(out**2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        one = tape.gradient(loss, first.trainable_variables)
        two = tape.gradient(size, last.trainable_variables)
        opt.apply_gradients(zip(one + two, model.trainable_variables))

    for i in range(3):
        step(*map(tf.constant, samples(8, seed=i)))
    return model.get_weights()


@use
def two_networks_against_each_other(compression):
    generator = keras.Sequential(layers(outputs=16))
    critic = keras.Sequential(layers(outputs=1, hidden=20))
    opts = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    @tf.function
    def step(noise, real):
        with tf.GradientTape() as g_tape, tf.GradientTape() as c_tape:
            fake = generator(noise)
            g_loss = tf.reduce_mean((critic(fake) - 1) ** 2)
            c_loss = tf.reduce_mean(critic(fake) ** 2) + tf.reduce_mean((critic(real) - 1) ** 2)
        for tape, loss, net, opt in (
            (g_tape, g_loss, generator, opts[0]),
            (c_tape, c_loss, critic, opts[1]),
        ):
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            grads = tape.gradient(loss, net.trainable_variables)
            opt.apply_gradients(zip(grads, net.trainable_variables))

    for i in range(3):
        step(tf.constant(samples(8, i)[0]), tf.constant(samples(8, i + 9)[0]))
    return generator.get_weights() + critic.get_weights()


# ---- what has an expectation of its own ----------------------------------------------------------


@pytest.mark.parametrize("make", [hvd_fec.FEC, hvd_fec.Ternary, lambda: hvd_fec.TwoBit(0.5)])
def test_all_ranks_skip_a_step_that_overflows_on_one(make):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(5)
        model = keras.Sequential(layers(hidden=128))
        compressor = make()
        opt = sgd(compressor, groups=1)
        opt = keras.mixed_precision.LossScaleOptimizer(opt, initial_scale=2.0**7)
        model.compile(opt, "mse")
        scales = []
        for step in range(4):
            x, y = samples(8, step)
            if step == 1 and RANK == SIZE - 1:
                x[0, 0] = np.inf
            before = model.get_weights()
            model.train_on_batch(x, y)
            after = model.get_weights()
            assert all(np.array_equal(a, b) for a, b in zip(before, after)) == (step == 1)
            assert all(np.isfinite(w).all() for w in after)
            scales.append(float(opt.loss_scale))
            same_everywhere([*after, scales[-1]])
        assert scales == [128, 64, 64, 64]
        assert compressor.stats.steps > 0
    finally:
        keras.mixed_precision.set_global_policy("float32")
