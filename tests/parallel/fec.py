"""FEC through Horovod, on every path that takes ``compression=``.

Every test states its expectation in NumPy: the codec is run for all ranks on this rank, and the
decoded payloads are summed in rank order.
"""

import json
import math

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_fec
import hvd_fec.exchange
from hvd_fec.codecs import FecCodec

RANK, SIZE = hvd.rank(), hvd.size()
SHAPE = (64, 48)
T = -9


def gradient(rank, step, shape=SHAPE, stream=0):
    """What ``rank`` contributes in ``step``: known to every rank."""
    rng = np.random.default_rng([rank, step, stream])
    return (rng.standard_normal(shape) * 0.003).astype(np.float32)


class Expected:
    """The reduction of a sequence of gradients, with a residual per rank."""

    def __init__(self, factor, ranks=range(SIZE), threshold=T, feedback=True):
        self.factor, self.ranks, self.codec = factor, ranks, FecCodec(threshold)
        self.residuals = {} if feedback else None

    def step(self, gradients):
        """``gradients``: one array per rank."""
        total = 0
        for rank, g in zip(self.ranks, gradients):
            residual = None
            if self.residuals is not None:
                residual = self.residuals.setdefault(rank, np.zeros(g.size, np.float32))
            total = total + self.codec.decode(self.codec.encode(g, residual)).reshape(g.shape)
        return total.astype(np.float64) * self.factor


def close(actual, wanted, rtol=1e-6):
    # Terms of about 2**T may cancel, and leave the rounding of each.
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, wanted, rtol=rtol, atol=rtol * 2.0**T)


def same_everywhere(*arrays, process_set=hvd.global_process_set):
    """The arrays are equal to the last bit on all ranks."""
    flat = np.concatenate([np.asarray(a).reshape(-1).view(np.uint8) for a in arrays])
    everyone = hvd.allgather(tf.constant(flat[None]), process_set=process_set).numpy()
    assert (everyone == flat).all()


# ---- hvd.allreduce and hvd.grouped_allreduce ----------------------------------------------------

FACTORS = [
    (dict(op=hvd.Sum), 1.0),
    (dict(op=hvd.Average), 1 / SIZE),
    (dict(), 1 / SIZE),
    (dict(op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 1.5),
    (dict(op=hvd.Average, prescale_factor=4.0), 4 / SIZE),
]


@pytest.mark.parametrize("kwargs, factor", FACTORS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_linear_ops(kwargs, factor, dtype):
    dtype = tf.as_dtype(dtype)
    rtol = {2: 5e-3, 4: 1e-6, 8: 1e-6}[dtype.size] * (4 if dtype == tf.bfloat16 else 1)
    mine = [gradient(r, 0).astype(dtype.as_numpy_dtype) for r in range(SIZE)]
    wanted = Expected(factor).step(mine)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=hvd_fec.FEC(T), name="g", **kwargs))
    for result in (
        hvd.allreduce(tf.constant(mine[RANK]), compression=hvd_fec.FEC(T), name="g", **kwargs),
        reduce(tf.constant(mine[RANK])),
    ):
        assert result.dtype == dtype and result.shape == SHAPE
        close(tf.cast(result, tf.float64), wanted, rtol)
        same_everywhere(tf.cast(result, tf.float64))


@pytest.mark.parametrize("graph", [False, True])
def test_group_shares_one_exchange(graph):
    compressor = hvd_fec.FEC(T)
    shapes = [(2000,), (1,), (40, 50), (3, 3), (1024,)]

    def reduce(tensors):
        return hvd.grouped_allreduce(tensors, compression=compressor, op=hvd.Sum, name="group")

    if graph:
        reduce = tf.function(reduce)
    expected = [Expected(1.0) for _ in shapes]
    for step in range(3):
        results = reduce([tf.constant(gradient(RANK, step, s, i)) for i, s in enumerate(shapes)])
        for i, (shape, result) in enumerate(zip(shapes, results)):
            everyone = [gradient(r, step, shape, i) for r in range(SIZE)]
            if np.prod(shape) < 1024:
                close(result, np.sum(everyone, axis=0, dtype=np.float64), 1e-5)
            else:
                close(result, expected[i].step(everyone))
        same_everywhere(*results)
    assert compressor.stats.steps == 3
    assert len(compressor.residuals) == 3
    if graph:
        nodes = (
            reduce.get_concrete_function([tf.TensorSpec(s, tf.float32) for s in shapes])
            .graph.as_graph_def()
            .node
        )
        assert sum(n.op == "HorovodAllgather" for n in nodes) == 1


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_other_ops_are_refused(op):
    with pytest.raises(ValueError, match="hvd.Average or op=hvd.Sum only"):
        hvd.allreduce(tf.ones(2000), compression=hvd_fec.FEC(T), op=getattr(hvd, op))


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_are_found_out_by_the_token(op):
    """Where the caller's frames tell nothing, as in a wrapper around Horovod's internals."""
    compressor = hvd_fec.FEC(T)
    token, ctx = compressor.compress(tf.constant(gradient(RANK, 0)))
    reduced = hvd._allreduce(token, op=getattr(hvd, op))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="linear reduction"):
        compressor.decompress(reduced, ctx)


def test_reducescatter_is_refused():
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="only allreduce"):
        hvd.reducescatter(tf.constant(gradient(RANK, 0)), compression=hvd_fec.FEC(T), op=hvd.Sum)


def test_bypass():
    compressor = hvd_fec.FEC(T, min_size=100)
    small = tf.range(99, dtype=tf.float32) * (RANK + 1)
    close(
        hvd.allreduce(small, compression=compressor, op=hvd.Sum),
        np.arange(99) * SIZE * (SIZE + 1) / 2,
    )
    close(
        hvd.allreduce(tf.ones(2000, tf.int32), compression=compressor, op=hvd.Sum),
        np.full(2000, SIZE),
    )
    assert hvd.allreduce(tf.ones(5, tf.bfloat16), compression=compressor).dtype == tf.bfloat16

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def unknown(x):
        return hvd.allreduce(x, compression=compressor, op=hvd.Sum)

    tiny = np.full(3000, 1e-6, np.float32)
    close(unknown(tf.constant(tiny)), tiny.astype(np.float64) * SIZE)
    empty = hvd.allreduce(tf.zeros([0, 3]), compression=hvd_fec.FEC(T, min_size=0))
    assert empty.shape == (0, 3)
    assert compressor.stats.steps == 0 and compressor.stats.ratio == 1.0


def test_eager_tensors_without_a_name_keep_no_residual():
    compressor = hvd_fec.FEC(T)
    expected = Expected(1.0, feedback=False)
    with pytest.warns(RuntimeWarning, match="name="):
        first = hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=compressor, op=hvd.Sum)
    close(first, expected.step([gradient(r, 0) for r in range(SIZE)]))
    second = hvd.allreduce(tf.constant(gradient(RANK, 1)), compression=compressor, op=hvd.Sum)
    close(second, expected.step([gradient(r, 1) for r in range(SIZE)]))
    assert len(compressor.residuals) == 0


def test_without_error_feedback():
    compressor = hvd_fec.FEC(T, error_feedback=False)
    expected = Expected(1.0, feedback=False)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Sum))
    for step in range(3):
        close(
            reduce(tf.constant(gradient(RANK, step))),
            expected.step([gradient(r, step) for r in range(SIZE)]),
        )
    assert len(compressor.residuals) == 0


def test_process_set(even):
    others = hvd_fec.FEC(T, process_set=hvd.global_process_set)
    if not even.included() or even.size() < 2:
        return
    ranks = even.ranks
    expected = Expected(1 / len(ranks), ranks)
    compressor = hvd_fec.FEC(T)
    reduce = tf.function(
        lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Average, process_set=even)
    )
    for step in range(2):
        result = reduce(tf.constant(gradient(RANK, step)))
        close(result, expected.step([gradient(r, step) for r in ranks]))
        same_everywhere(result, process_set=even)
    with pytest.raises(ValueError, match="process_set"):
        hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=others, process_set=even)


# ---- two shots ---------------------------------------------------------------------------------


class ExpectedTwoShot(Expected):
    """Every rank averages its slice of what the others sent, and sends that compressed again.
    ``before`` and ``after``: elements of the group on both sides of this tensor."""

    def __init__(self, factor, before=0, after=0):
        super().__init__(factor)
        self.before, self.after, self.means = before, after, {}

    def step(self, gradients):
        flat = [g.reshape(-1) for g in gradients]
        n, size = len(flat), flat[0].size
        group = self.before + size + self.after
        cuts = {min(max(group * i // n - self.before, 0), size) for i in range(n + 1)}
        cuts = sorted(cuts)
        finite = [np.isfinite(g).all() for g in flat]
        codec = hvd_fec.codecs.FecCodec(T - math.log2(n) / 2)
        result = np.empty(size, np.float64)
        for a, b in zip(cuts, cuts[1:]):
            mean = np.zeros(b - a, np.float32)
            for rank, g in enumerate(flat):
                residual = self.residuals.setdefault(rank, np.zeros(size, np.float32))[a:b]
                payload = self.codec.encode(g[a:b], residual if finite[rank] else None)
                self.codec.decode_add(payload, mean, 1 / n)
            residual = self.means.setdefault(a, np.zeros(b - a, np.float32))
            result[a:b] = codec.decode(codec.encode(mean, residual))
        return result.reshape(gradients[0].shape) * self.factor


@pytest.mark.parametrize("kwargs, factor", FACTORS)
def test_two_shot(kwargs, factor):
    compressor = hvd_fec.FEC(T, exchange="twoshot")
    shapes = [SHAPE, (3, 7, 101), (1024,)]
    reduce = tf.function(
        lambda tensors: hvd.grouped_allreduce(tensors, compression=compressor, **kwargs)
    )
    # The average is compressed, Horovod's factor is for the sum.
    sizes = [int(np.prod(shape)) for shape in shapes]
    expected = [
        ExpectedTwoShot(factor * SIZE, sum(sizes[:i]), sum(sizes[i + 1 :]))
        for i in range(len(shapes))
    ]
    for step in range(5):
        everyone = [[gradient(r, step, s, i) for r in range(SIZE)] for i, s in enumerate(shapes)]
        if step == 2:
            everyone[0][SIZE - 1][5, 5] = np.nan
        results = reduce([tf.constant(tensors[RANK]) for tensors in everyone])
        for result, wanted, tensors in zip(results, expected, everyone):
            close(result, wanted.step(tensors))
        same_everywhere(*results)
        assert np.isnan(results[0].numpy()).any() == (step == 2)
    for _, residual in compressor.residuals.items():
        assert np.isfinite(residual).all()
    pieces = hvd_fec.exchange.share(sizes, RANK, SIZE)
    assert len(compressor.residuals) == len(shapes) + len(pieces)
    assert compressor.stats.steps == 5


def test_two_shot_pays():
    pays = hvd_fec.cost.two_shot_pays
    assert not any(pays(2, 4 * 10**k) for k in range(4, 12))  # nothing to be saved
    assert not pays(4, 10**6) and pays(4, 10**7)
    assert pays(8, 2 * 10**6) and not pays(8, 10**6)
    if SIZE > 2:
        names = {n: hvd_fec.FEC(T, exchange=n) for n in ("auto", "allgather")}
        for name, compressor in names.items():
            reduce = tf.function(lambda x, c=compressor: hvd.allreduce(x, compression=c))
            graph = reduce.get_concrete_function(tf.TensorSpec([9_000_000])).graph.as_graph_def()
            two_shot = any(node.op == "HorovodAlltoall" for node in graph.node)
            assert two_shot == (name == "auto")


# ---- failures ----------------------------------------------------------------------------------


def test_non_finite_gradient_reaches_every_rank_and_passes():
    compressor = hvd_fec.FEC(T)
    expected = Expected(1 / SIZE)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor))
    bad_rank = SIZE - 1
    for step in range(4):
        everyone = [gradient(r, step) for r in range(SIZE)]
        if step == 1:
            everyone[bad_rank][3, 5] = np.nan
            everyone[bad_rank][7, 1] = -np.inf
        result = reduce(tf.constant(everyone[RANK])).numpy()
        wanted = expected.step(everyone)
        np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))
        close(result, wanted)
        same_everywhere(result)
        for _, residual in compressor.residuals.items():
            assert np.isfinite(residual).all()
    assert np.isfinite(result).all()


def test_loss_scaling_stays_in_step():
    """One rank overflows: all ranks must skip the step and halve the scale together."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model, compressor, opt = linear_model(loss_scale=True)
        for step in range(3):
            x = gradient(RANK, step)[None]
            if step == 1 and RANK == 0:
                x[0, 0, 0] = np.inf
            before = model.w.numpy()
            model.train_on_batch(x, np.zeros(1))
            scale = float(model.optimizer.loss_scale)
            assert (model.w.numpy() == before).all() == (step == 1)
            same_everywhere(model.w.numpy(), np.float32(scale))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
def test_a_rank_that_cannot_encode_stops_all_ranks_with_its_reason(monkeypatch, exchange):
    compressor = hvd_fec.FEC(T, exchange=exchange)
    if RANK == SIZE - 1:

        def fail(*args):
            raise MemoryError("no room for the payload")

        step = "encode_counting" if exchange == "allgather" else "is_finite"
        monkeypatch.setattr(compressor._codec, step, fail)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor))
    with pytest.raises(Exception, match=rf"rank {SIZE - 1}: MemoryError: no room"):
        reduce(tf.constant(gradient(RANK, 0)))


def test_ranks_with_different_exchanges_are_told_so():
    compressor = hvd_fec.FEC(T, exchange="twoshot" if RANK == 0 else "allgather")
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor))
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        reduce(tf.constant(gradient(RANK, 0)))


def test_factors_beyond_the_dtype_are_refused():
    x = tf.constant(gradient(RANK, 0).astype(np.float16))
    for factor in (1e-9, 1e9):
        with pytest.raises((ValueError, tf.errors.OpError), match="neither vanish nor overflow"):
            hvd.allreduce(x, compression=hvd_fec.FEC(T), op=hvd.Sum, postscale_factor=factor)


@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
def test_constant_gradients_are_exchanged_every_step(exchange):
    compressor = hvd_fec.FEC(T, exchange=exchange)
    everyone = [np.full(SHAPE, 2.0 ** (T - 2), np.float32)] * SIZE

    @tf.function
    def reduce():
        return hvd.allreduce(tf.constant(everyone[RANK]), compression=compressor, op=hvd.Sum)

    expected = ExpectedTwoShot(SIZE) if exchange == "twoshot" else Expected(1.0)
    sums = []
    for _ in range(6):
        sums.append(float(tf.reduce_sum(reduce())))
        close(sums[-1], expected.step(everyone).sum(), 1e-5)
    assert compressor.stats.steps == 6
    assert 0 in sums and any(sums)


# ---- optimizers and tapes ----------------------------------------------------------------------


class Linear(keras.Model):
    """Its gradient is its input: w of SHAPE is compressed, b is too small to be."""

    def __init__(self, dtype=None):
        super().__init__()
        self.w = self.add_weight("w", SHAPE, dtype=dtype, initializer="zeros")
        self.b = self.add_weight("b", (4,), dtype=dtype, initializer="zeros")

    def call(self, x):
        w, b = tf.convert_to_tensor(self.w), tf.convert_to_tensor(self.b)
        x = tf.cast(x, w.dtype)
        return tf.reduce_sum(w * x, [1, 2]) + tf.reduce_sum(b) * x[:, 0, 0]


def linear_model(
    loss_scale=False, run_eagerly=False, dtype=None, legacy=False, threshold=T, **kwargs
):
    model = Linear(dtype)
    compressor = kwargs.pop("compression", None) or hvd_fec.FEC(threshold)
    sgd = keras.optimizers.legacy.SGD if legacy else keras.optimizers.SGD
    opt = hvd_keras.DistributedOptimizer(sgd(1.0), compression=compressor, **kwargs)
    if loss_scale:
        opt = keras.mixed_precision.LossScaleOptimizer(opt, initial_scale=2.0**7)
    model.compile(opt, lambda y, p: p, run_eagerly=run_eagerly)
    return model, compressor, opt


CASES = {
    "default": (dict(), 1 / SIZE),
    "groups": (dict(groups=1), 1 / SIZE),
    "sum": (dict(op=hvd.Sum), 1.0),
    "predivide": (dict(gradient_predivide_factor=2.0), 1 / SIZE),
    "eager": (dict(run_eagerly=True), 1 / SIZE),
    "eager groups": (dict(run_eagerly=True, groups=1), 1 / SIZE),
    "legacy": (dict(legacy=True), 1 / SIZE),
    "float16": (dict(dtype="float16"), 1 / SIZE),
}


@pytest.mark.parametrize("case", CASES)
def test_optimizer(case):
    kwargs, factor = CASES[case]
    half = kwargs.get("dtype") == "float16"
    model, compressor, _ = linear_model(**kwargs)
    expected = Expected(factor)
    weights, bias = np.zeros(SHAPE), 0.0
    for step in range(4):
        everyone = [gradient(r, step) for r in range(SIZE)]
        model.train_on_batch(everyone[RANK][None], np.zeros(1))
        grads = [g.astype(np.float16) for g in everyone] if half else everyone
        weights -= expected.step(grads)
        bias -= factor * sum(float(g[0, 0]) for g in everyone)
    tolerance = dict(rtol=1e-2, atol=1e-4) if half else dict(rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.w.numpy(), weights, **tolerance)
    np.testing.assert_allclose(model.b.numpy(), np.full(4, bias), **tolerance)
    same_everywhere(model.w.numpy())
    assert compressor.stats.steps == 4
    assert len(compressor.residuals) == 1


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_backward_passes_per_step(average, eager):
    model, compressor, _ = linear_model(
        run_eagerly=eager, backward_passes_per_step=2, average_aggregated_gradients=average
    )
    expected = Expected((0.5 if average else 1.0) / SIZE)
    weights = np.zeros(SHAPE)
    for step in range(3):
        everyone = []
        for rank in range(SIZE):
            passes = [gradient(rank, step, stream=i) for i in range(2)]
            everyone.append(passes[0] + passes[1])
            if rank == RANK:
                for x in passes:
                    model.train_on_batch(x[None], np.zeros(1))
        weights -= expected.step(everyone)
    np.testing.assert_allclose(model.w.numpy(), weights, rtol=1e-5, atol=1e-7)
    assert compressor.stats.steps == 3


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("groups", [None, 1])
def test_gradient_tape(graph, groups):
    compressor = hvd_fec.FEC(T)
    a, b = tf.Variable(tf.zeros(SHAPE)), tf.Variable(tf.zeros(SHAPE))

    def step_fn(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a * x) + tf.reduce_sum(b * y)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
        return tape.gradient(loss, [a, b])

    if graph:
        step_fn = tf.function(step_fn)
    expected = Expected(1 / SIZE), Expected(1 / SIZE)
    for step in range(3):
        results = step_fn(*(tf.constant(gradient(RANK, step, stream=i)) for i in range(2)))
        for i, result in enumerate(results):
            close(result, expected[i].step([gradient(r, step, stream=i) for r in range(SIZE)]))
    assert len(compressor.residuals) == 2


def test_optimizers_that_share_a_compressor_do_not_share_residuals():
    """Horovod gives equal optimizers one traced function, so the graphs cannot tell them apart."""
    compressor = hvd_fec.FEC(T)
    models = [linear_model(compression=compressor)[0] for _ in range(2)]
    expected = [Expected(1 / SIZE) for _ in models]
    weights = [np.zeros(SHAPE) for _ in models]
    for step in range(4):
        for i, model in enumerate(models):
            everyone = [gradient(r, step, stream=i) * (1 + 9 * i) for r in range(SIZE)]
            model.train_on_batch(everyone[RANK][None], np.zeros(1))
            weights[i] -= expected[i].step(everyone)
    for model, wanted in zip(models, weights):
        np.testing.assert_allclose(model.w.numpy(), wanted, rtol=1e-5, atol=1e-7)
    assert len(compressor.residuals) == 2


def test_equal_compressors_do_not_share_residuals():
    compressors = [hvd_fec.FEC(T), hvd_fec.FEC(T)]
    assert compressors[0] != compressors[1]
    expected = [Expected(1 / SIZE), Expected(1 / SIZE)]
    v = tf.Variable(tf.zeros(SHAPE))
    for step in range(3):
        for i, compressor in enumerate(compressors):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v * gradient(RANK, step, stream=i))
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            close(
                tape.gradient(loss, [v])[0],
                expected[i].step([gradient(r, step, stream=i) for r in range(SIZE)]),
            )


def test_named_and_unnamed_functions_do_not_share_residuals():
    compressor = hvd_fec.FEC(T)

    def make(name):
        def reduce(x):
            return hvd.allreduce(x, compression=compressor, op=hvd.Sum, name=name)

        reduce.__name__ = f"reduce_{name}"
        return tf.function(reduce)

    functions = [make("a"), make("b"), make(None)]
    expected = [Expected(1.0) for _ in functions]
    for step in range(3):
        for i, (reduce, wanted) in enumerate(zip(functions, expected)):
            everyone = [gradient(r, step, stream=i) for r in range(SIZE)]
            close(reduce(tf.constant(everyone[RANK])), wanted.step(everyone))
    assert len(compressor.residuals) == 3


def test_the_class_is_not_an_instance():
    with pytest.raises(TypeError, match="an instance"):
        hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=hvd_fec.FEC)


def dense(**jit):
    model = keras.Sequential([keras.layers.Input(64), keras.layers.Dense(32)])
    opt = keras.optimizers.SGD(0.1, jit_compile=jit.pop("optimizer", False))
    model.compile(hvd_keras.DistributedOptimizer(opt, compression=hvd_fec.FEC()), "mse", **jit)
    return model


def fit(model):
    model.fit(np.ones((8, 64)), np.ones((8, 32)), batch_size=8, verbose=0)


def reduce(x):
    return hvd.allreduce(x, op=hvd.Sum, name="xla", compression=hvd_fec.FEC())


@pytest.mark.parametrize(
    "use",
    [
        lambda: fit(dense(jit_compile=True)),
        lambda: tf.function(reduce, jit_compile=True)(tf.ones(2000)),
        lambda: tf.function(tf.function(reduce), jit_compile=True)(tf.ones(2000)),
    ],
)
def test_xla_is_refused(use):
    with pytest.raises(RuntimeError, match="XLA cannot compile .* leave jit_compile=True out of"):
        use()


def test_xla_beside_the_exchange():
    fit(dense(optimizer=True))
    compiled = tf.function(lambda x: 2 * x, jit_compile=True)
    reduced = tf.function(lambda x: reduce(compiled(x)))(tf.fill([2000], 2 / 3))
    np.testing.assert_allclose(reduced, 4 / 3 * SIZE, rtol=1e-6)  # no other value of its octave


def test_retrace_keeps_the_residual():
    compressor = hvd_fec.FEC(T)
    expected = Expected(1 / SIZE)
    v = tf.Variable(tf.zeros(SHAPE))

    @tf.function
    def step_fn(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * tf.reduce_sum(batch, 0))
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [v])[0]

    for step in range(4):  # another batch size each time: four traces
        mine = np.concatenate([gradient(RANK, step)[None], np.zeros((step, *SHAPE), np.float32)])
        close(step_fn(tf.constant(mine)), expected.step([gradient(r, step) for r in range(SIZE)]))
    assert step_fn.experimental_get_tracing_count() == 4
    assert len(compressor.residuals) == 1
    assert compressor.stats.steps == 4


def test_embedding_gradients_are_sparse_unless_asked_otherwise():
    for sparse_as_dense, compressed in ((False, 0), (True, 1)):
        compressor = hvd_fec.FEC(T)
        model = keras.Sequential(
            [
                keras.layers.Embedding(500, 8, input_length=4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        opt = hvd_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=compressor, sparse_as_dense=sparse_as_dense
        )
        model.compile(opt, "mse")
        model.build((None, 4))
        hvd.broadcast_variables(model.variables, 0)
        x = np.random.default_rng(RANK).integers(0, 500, (8, 4))
        model.fit(x, np.ones(8), verbose=0, epochs=2)
        same_everywhere(*[v.numpy() for v in model.variables])
        assert len(compressor.residuals) == compressed


def test_replicas_stay_bit_identical():
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, activation="relu", input_shape=(12, 12, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(5),
        ]
    )
    compressor = hvd_fec.FEC(T)
    opt = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), compression=compressor, groups=1
    )
    model.compile(opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(RANK)
    x = rng.standard_normal((16 * 200, 12, 12, 3)).astype(np.float32)
    y = (x[:, 0, 0].argmax(-1) + x[:, 1, 1].argmax(-1)) % 5
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[broadcast])
    assert compressor.stats.steps == 200
    assert np.isfinite(history.history["loss"]).all()
    same_everywhere(*[v.numpy() for v in model.variables])
    # State is per tensor, not per step.
    assert len(compressor.residuals) == 2


def test_stats():
    compressor = hvd_fec.FEC(T)
    stats = compressor.stats
    assert (stats.steps, stats.ratio, stats.density) == (0, 1.0, 0.0)
    x = gradient(RANK, 0, (30000,))
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor))
    for step in range(1, 4):
        reduce(tf.constant(x))
        assert stats.steps == step
        assert stats.bytes_dense == 120000 * step
    payload = FecCodec(T).encode(x)
    assert stats.bytes_sent > 3 * payload.size
    assert 0.4 < stats.density < 0.7
    assert stats.ratio == stats.bytes_dense / stats.bytes_sent
    compressor.reset()
    assert (stats.steps, stats.bytes_dense, len(compressor.residuals)) == (0, 0, 0)


def test_compression_namespace():
    assert hvd_fec.Compression.none is hvd.Compression.none
    assert hvd_fec.Compression.fp16 is hvd.Compression.fp16
    fec = hvd_fec.Compression.fec
    assert isinstance(fec, hvd_fec.FEC) and isinstance(fec, type(fec).__mro__[-2])
    assert hvd_fec.Compression.fec is fec
    result = hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=fec, op=hvd.Sum, name="n")
    close(result, Expected(1.0).step([gradient(r, 0) for r in range(SIZE)]))


MODEL = [(300, 300), *[(16, 3, 3)] * 20, *[(64,)] * 30, ()]


def steps_of(compressor, steps, groups=True, shapes=MODEL):
    """Exchange random gradients of unlike sizes; returns what came back in the last step."""
    rng = np.random.default_rng(RANK)
    scales = [np.exp(rng.standard_normal()) for _ in shapes]

    @tf.function
    def reduce(tensors):
        if groups:
            return hvd.grouped_allreduce(tensors, compression=compressor, name="model")
        return [
            hvd.allreduce(tensor, compression=compressor, name=f"tensor{i}")
            for i, tensor in enumerate(tensors)
        ]

    for _ in range(steps):
        results = reduce(
            [
                tf.constant(scale * rng.standard_normal(shape), tf.float32)
                for shape, scale in zip(shapes, scales)
            ]
        )
    return results


@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
@pytest.mark.parametrize("ratio, options", [(10, {}), (50, {"momentum": 0.9}), (100, {})])
def test_whole_run_has_the_ratio_asked_for(ratio, options, exchange):
    compressor = hvd_fec.FEC(ratio=ratio, exchange=exchange, **options)
    same_everywhere(*steps_of(compressor, 20))
    assert abs(compressor.stats.ratio / ratio - 1) < 0.1
    before = compressor.stats.totals()
    same_everywhere(*steps_of(compressor, 20))
    assert abs(compressor.stats.totals().since(before).ratio / ratio - 1) < 0.1


def test_ratio_without_groups_is_that_of_the_whole_model():
    compressor = hvd_fec.FEC(ratio=20, exchange="allgather")
    steps_of(compressor, 20, groups=False, shapes=[(300, 300), (50, 50), (10, 100), (100, 500)])
    assert abs(compressor.stats.ratio / 20 - 1) < 0.1
    # one threshold for all, so the tensor of larger values sends a larger share of them
    shares = sorted(t.density for t in compressor.stats.tensors().values())
    assert shares[-1] > 2 * shares[0]


def test_density_asked_for_is_sent():
    compressor = hvd_fec.FEC(density=0.02)
    steps_of(compressor, 20)
    assert abs(compressor.stats.density / 0.02 - 1) < 0.1


def test_ratio_counts_tensors_that_are_not_compressed():
    compressor = hvd_fec.FEC(ratio=20, min_size=65)
    steps_of(compressor, 20)
    assert len(compressor.stats.tensors()) == 2  # the large one, and the kernels joined
    assert abs(compressor.stats.ratio / 20 - 1) < 0.1


def test_warm_up_grows_by_equal_factors_and_the_ratio_can_be_changed():
    compressor = hvd_fec.FEC(ratio=100, warmup_steps=20)
    found = []
    for _ in range(4):
        before = compressor.stats.totals()
        steps_of(compressor, 10)
        found.append(compressor.stats.totals().since(before).ratio)
    assert found == sorted(found)
    assert found[0] < 15 < found[1] < 90 < found[3] < 115
    config = compressor.get_config()
    compressor.ratio = 25
    assert compressor.get_config() == config  # what a checkpoint is compared by
    other = hvd_fec.FEC(ratio=100, warmup_steps=20)
    other.load_state_dict(json.loads(json.dumps({**compressor.state_dict(), "residuals": {}})))
    assert other.ratio == 25
    before = compressor.stats.totals()
    steps_of(compressor, 30)
    assert abs(compressor.stats.totals().since(before).ratio / 25 - 1) < 0.15


def test_out_of_reach_is_said_and_something_is_sent():
    compressor = hvd_fec.FEC(ratio=50)
    with pytest.warns(RuntimeWarning, match="headers alone take 92"):
        result = steps_of(compressor, 3, shapes=[(10,)])
    assert any(np.any(r) for r in result) and compressor.stats.density


@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
def test_ratio_goes_on_bit_by_bit_after_a_restore(exchange):
    def run(compressor, first, last):
        results = []
        reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, name="t"))
        for step in range(first, last):
            results.append(reduce(tf.constant(gradient(RANK, step))).numpy())
        return results

    settings = {"ratio": 12, "momentum": 0.9, "exchange": exchange, "warmup_steps": 4}
    whole = run(hvd_fec.FEC(**settings), 0, 30)
    first, second = hvd_fec.FEC(**settings), hvd_fec.FEC(**settings)
    run(first, 0, 18)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(run(second, 18, 30), whole[18:])


@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction(exchange, nesterov, masking):
    m = np.float32(0.75)
    compressor = hvd_fec.FEC(
        -126, momentum=0.75, nesterov=nesterov, masking=masking, exchange=exchange
    )
    codec = compressor._codec
    reduce = tf.function(
        lambda x: hvd.allreduce(x, op=hvd.Sum, compression=compressor, name="momentum")
    )
    velocities = [np.zeros(2000, np.float32) for _ in range(SIZE)]
    residuals = [np.zeros(2000, np.float32) for _ in range(SIZE)]
    means = np.zeros(2000, np.float32)
    for step in range(4):
        total = np.zeros(2000, np.float32)
        for rank in range(SIZE):
            g, u = gradient(rank, step, (2000,)), velocities[rank]
            if nesterov:
                u[:] = m * (u + g)
                x = u + g
            else:
                u[:] = m * u + g
                x = u
            sent = codec.decode(codec.encode(x, residuals[rank]))
            if masking:
                u[sent != 0] = 0
            total += sent
        if exchange == "allgather":
            close(reduce(tf.constant(gradient(RANK, step, (2000,)))), total)
        else:
            mean = codec.decode(codec.encode(total / SIZE, means))
            close(reduce(tf.constant(gradient(RANK, step, (2000,)))), mean * SIZE, 1e-5)


def test_momentum_survives_a_gradient_that_is_not_finite():
    compressor = hvd_fec.FEC(-20, momentum=0.9)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, name="bad"))
    reduce(tf.constant(gradient(RANK, 0)))
    before = compressor.state_dict()["residuals"]
    bad = gradient(RANK, 1)
    if RANK == SIZE - 1:
        bad.reshape(-1)[3] = np.inf
    assert np.isnan(reduce(tf.constant(bad)).numpy().reshape(-1)[3])
    after = compressor.state_dict()["residuals"]
    assert len(before) == 2
    if RANK == SIZE - 1:
        for key in before:
            np.testing.assert_array_equal(before[key], after[key])


def test_local_clipping():
    compressor = hvd_fec.FEC(-126, clip_norm=2.0, error_feedback=False)
    x = gradient(0, 0, (2000,))
    result = hvd.allreduce(tf.constant(x), compression=compressor, name="clipped").numpy()
    scale = 2.0 / np.sqrt(SIZE) / np.linalg.norm(x)
    expected = compressor._codec.decode(compressor._codec.encode(x * np.float32(scale)))
    close(result, expected)


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.legacy.SGD])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_twice_is_warned_of(make, momentum, recwarn):
    import horovod.tensorflow.keras as hvd_keras

    compressor = hvd_fec.FEC(-20, momentum=0.9)
    optimizer = hvd_keras.DistributedOptimizer(
        make(0.1, momentum=momentum), compression=compressor, groups=1
    )
    model = keras.Sequential([keras.layers.Dense(1100, input_shape=(3,))])
    model.compile(optimizer, "mse")
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 1100)))
    said = [w for w in recwarn if "would count twice" in str(w.message)]
    assert len(said) == bool(momentum)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"ratio": 10, "threshold": -9}, "exclude each other"),
        ({"ratio": 6}, "above 6.4"),
        ({"ratio": float("nan")}, "above 6.4"),
        ({"density": 0}, "above 0 and at most 0.5"),
        ({"density": 0.6}, "above 0 and at most 0.5"),
        ({"warmup_steps": 5}, "needs a ratio or a density"),
        ({"ratio": 10, "warmup_steps": -1}, "non-negative integer"),
        ({"momentum": 1.0}, "from 0 to below 1"),
        ({"nesterov": True}, "needs a momentum"),
        ({"momentum": 0.9, "error_feedback": False}, "needs error_feedback"),
        ({"clip_norm": 0}, "positive number"),
    ],
)
def test_arguments_of_ratio_and_momentum_are_checked(arguments, text):
    with pytest.raises(ValueError, match=text):
        hvd_fec.FEC(**arguments)


def test_ratio_cannot_be_set_where_none_was_given():
    with pytest.raises(ValueError, match=r"make it FEC\(ratio=...\)"):
        hvd_fec.FEC(-9).ratio = 50
    with pytest.raises(ValueError, match=r"make it FEC\(density=...\)"):
        hvd_fec.FEC(ratio=10).density = 0.1
