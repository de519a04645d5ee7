"""What people do with Keras and Horovod, with a compressor in it.

Most tests train twice, with ``hvd.Compression.none`` and with ``Whole``: FEC around a codec that
sends the gradients as they are. The weights must then be those of ``none``, so everything but the
quantiser is compared with Horovod itself. ``fec.py`` and ``ternary.py`` test the quantisers.
"""

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

    def encode(self, x, residual=None):
        values = np.asarray(x).astype(np.float32).reshape(-1)
        payload = np.empty(wire.HEADER.size + values.nbytes, np.uint8)
        sections = (values.nbytes, 0, 0)
        kind = wire.DTYPES["float32"]
        wire.Header(1, kind, 0, 0, values.size, values.size, sections).write(payload)
        payload[wire.HEADER.size :] = values.view(np.uint8)
        return payload

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
    model = keras.Sequential(
        [
            keras.layers.Embedding(50, 8, input_length=4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(sgd(compression, sparse_as_dense=True, groups=1), "mse")
    x = np.random.default_rng(RANK).integers(0, 50, (16, 4))
    model.fit(x, np.ones((16, 3)), 8, 3, verbose=0, shuffle=False)
    return model.get_weights()


@use
def sparse_gradients(compression):
    model = keras.Sequential(
        [
            keras.layers.Embedding(50, 8, input_length=4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(sgd(compression), "mse")
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
