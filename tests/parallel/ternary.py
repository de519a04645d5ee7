"""Ternary and TwoBit through Horovod.

Every test states its expectation in NumPy, for all ranks, on this rank. The last one joins.
"""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_fec
from hvd_fec import compression, exchange
from hvd_fec.codecs.ternary import survey

RANK, SIZE = hvd.rank(), hvd.size()
ALL = range(SIZE)
LENGTHS = [*range(301), 1_000_003]
ERRORS = (RuntimeError, ValueError, tf.errors.OpError)


def gradient(rank, step, shape=(64, 48), stream=0):
    """What ``rank`` contributes in ``step``: known to every rank."""
    rng = np.random.default_rng([rank, step, stream])
    return rng.standard_normal(shape).astype(np.float32)


class TwoBitRule:
    """MXNet's rule, and the sum over ranks of what it sends in units of the threshold."""

    def __init__(self, threshold, ranks=ALL):
        self.threshold = np.float32(threshold)
        self.residuals = {rank: 0 for rank in ranks}

    def step(self, gradients):
        total = 0
        for (rank, residual), gradient in zip(self.residuals.items(), gradients):
            v = residual + gradient.astype(np.float32)
            t = (v >= self.threshold).astype(np.int64) - (v <= -self.threshold)
            self.residuals[rank] = v - t.astype(np.float32) * self.threshold
            total = total + t
        return total


def same_everywhere(*arrays, process_set=hvd.global_process_set):
    for array in arrays:
        rows = hvd.allgather(tf.reshape(array, [1, -1]), process_set=process_set).numpy()
        for row in rows:
            np.testing.assert_array_equal(row, rows[0])


def residual_of(compressor):
    ((_, residual),) = compressor.residuals.items()
    return residual


# ---- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True])
def test_sums_are_exact_for_all_lengths(graph):
    compressor = hvd_fec.TwoBit(threshold=1.0, min_size=0)

    def reduce(tensors):
        return hvd.grouped_allreduce(tensors, compression=compressor, op=hvd.Sum, name="lengths")

    if graph:
        reduce = tf.function(reduce)
    rules = [TwoBitRule(1.0) for _ in LENGTHS]
    for step in range(2):
        results = reduce([tf.constant(gradient(RANK, step, n, n)) for n in LENGTHS])
        for n, rule, result in zip(LENGTHS, rules, results):
            np.testing.assert_array_equal(result, rule.step([gradient(r, step, n, n) for r in ALL]))
        same_everywhere(results[-1])
    assert compressor.stats.steps == 2


@pytest.mark.parametrize(
    "kwargs, factor",
    [
        (dict(op=hvd.Sum), 1.0),
        (dict(op=hvd.Average), 1 / SIZE),
        (dict(), 1 / SIZE),
        (dict(op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 1.5),
        (dict(op=hvd.Average, prescale_factor=4.0), 4 / SIZE),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_linear_ops(kwargs, factor, dtype):
    dtype = tf.as_dtype(dtype)
    rtol = {2: 1e-2, 4: 1e-6, 8: 1e-6}[dtype.size]
    mine = [gradient(r, 0).astype(dtype.as_numpy_dtype) for r in ALL]
    wanted = TwoBitRule(0.5).step(mine) * 0.5 * factor
    compressor = hvd_fec.TwoBit(0.5)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, **kwargs))
    for result in (
        hvd.allreduce(tf.constant(mine[RANK]), compression=compressor, name="g", **kwargs),
        reduce(tf.constant(mine[RANK])),
    ):
        assert result.dtype == dtype and result.shape == mine[0].shape
        np.testing.assert_allclose(tf.cast(result, tf.float64), wanted, rtol)
        same_everywhere(tf.cast(result, tf.float64))


@pytest.mark.parametrize("threshold", [0.5, 0.01])
def test_two_bit_replays_mxnet(threshold):
    compressor = hvd_fec.TwoBit(threshold, min_size=0)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Sum))
    rule = TwoBitRule(threshold)
    for step in range(50):
        everyone = [gradient(r, step, 777) * np.float32(2 * threshold) for r in ALL]
        total = rule.step(everyone).astype(np.float32) * np.float32(threshold)
        np.testing.assert_array_equal(reduce(tf.constant(everyone[RANK])), total)
        np.testing.assert_array_equal(residual_of(compressor), rule.residuals[RANK])


def test_threshold_rule_uses_the_peak_of_all_ranks():
    compressor = hvd_fec.Ternary("threshold", sparsity=0.5)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Sum))
    residuals = {rank: 0 for rank in ALL}
    for step in range(5):
        v = [residuals[r] + gradient(r, step) * np.float32(1 + r) for r in ALL]
        scale = np.float32(max(np.abs(x).max() for x in v) * 0.5)
        t = [np.sign(x) * (np.abs(x) >= scale / 2) for x in v]
        residuals = {r: v[r] - t[r].astype(np.float32) * scale for r in ALL}
        result = reduce(tf.constant(gradient(RANK, step) * np.float32(1 + RANK)))
        np.testing.assert_array_equal(result, sum(t).astype(np.float32) * scale)
        np.testing.assert_array_equal(residual_of(compressor), residuals[RANK].reshape(-1))


@pytest.mark.parametrize("clip", [None, 2.5])
def test_stochastic_rule(clip):
    draws = 50

    def run(seed, draws):
        compressor = hvd_fec.Ternary("stochastic", clip_sigma=clip, seed=seed)
        reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Sum))
        return np.stack([reduce(tf.constant(gradient(RANK, 0))) for _ in range(draws)])

    drawn = run(1, draws)
    same_everywhere(drawn)
    np.testing.assert_array_equal(drawn[:3], run(1, 3))  # a run repeats exactly
    assert (drawn[0] != drawn[1]).any() and (drawn[0] != run(2, 1)[0]).any()
    everyone = np.stack([gradient(r, 0) for r in ALL]).astype(np.float64)
    scale = np.abs(everyone).max()
    if clip:
        scale = min(scale, clip * np.sqrt((everyone**2).mean()))
    np.testing.assert_allclose(drawn / scale, np.round(drawn / scale), atol=1e-5)
    assert np.abs(drawn / scale).max() <= SIZE + 1e-5
    wanted = np.clip(everyone, -scale, scale)
    p = np.abs(wanted) / scale
    errors = (drawn.mean(axis=0) - wanted.sum(axis=0)) / scale
    # independent over elements, draws and ranks
    assert abs(errors.mean()) < 5 * np.sqrt((p * (1 - p)).sum() / draws) / errors.size
    assert errors.std() == pytest.approx(np.sqrt((p * (1 - p)).sum(axis=0).mean() / draws), rel=0.1)


# ---- exchanges -----------------------------------------------------------------------------------


def test_few_ranks_gather_and_many_add(monkeypatch):
    gathered = []
    gather = exchange.gather

    def noting(*args):
        gathered.append(args)
        return gather(*args)

    monkeypatch.setattr(exchange, "gather", noting)
    compressor = hvd_fec.TwoBit(0.5)
    hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=compressor, name="g")
    assert bool(gathered) == (SIZE <= 3)
    digits = {2: 40, 3: 40, 4: 20, 8: 15}[SIZE]
    words = -(-gradient(0, 0).size // digits)
    token, table, failed = 2 * 4, SIZE * 2 * 8, 8
    assert compressor.stats.bytes_sent == 8 * words + token + table + failed


def test_group_shares_one_exchange():
    compressor = hvd_fec.Ternary("threshold")
    shapes = [(2000,), (1,), (40, 50), (3, 3), (1024,)]
    reduce = tf.function(
        lambda tensors: hvd.grouped_allreduce(tensors, compression=compressor, op=hvd.Sum)
    )
    results = reduce([tf.constant(gradient(RANK, 0, s, i)) for i, s in enumerate(shapes)])
    for i in (1, 3):
        wanted = np.sum([gradient(r, 0, shapes[i], i) for r in ALL], axis=0)
        np.testing.assert_allclose(results[i], wanted, rtol=1e-5, atol=1e-6)
    same_everywhere(*results)
    assert len(compressor.residuals) == 3
    graph = reduce.get_concrete_function([tf.TensorSpec(s, tf.float32) for s in shapes]).graph
    graph = graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    names = [node.name for node in nodes if node.op in ("HorovodAllreduce", "HorovodAllgather")]
    assert sum("hvd_fec" in name for name in names) == 3, names  # survey; gather or sum


def test_bypass():
    compressor = hvd_fec.TwoBit(0.5, min_size=100)
    small = tf.range(99, dtype=tf.float32) * (RANK + 1)
    result = hvd.allreduce(small, compression=compressor, op=hvd.Sum)
    np.testing.assert_allclose(result, np.arange(99) * SIZE * (SIZE + 1) / 2)
    whole = hvd.allreduce(tf.ones(2000, tf.int32), compression=compressor, op=hvd.Sum)
    np.testing.assert_array_equal(whole, SIZE)
    assert compressor.stats.steps == 0


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
@pytest.mark.parametrize("kind", [hvd_fec.Ternary, hvd_fec.TwoBit])
def test_other_ops_are_refused(op, kind):
    with pytest.raises(ValueError, match="hvd.Average or op=hvd.Sum only"):
        hvd.allreduce(tf.ones(2000), compression=kind(), op=getattr(hvd, op))


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_are_found_out_by_the_token(op):
    compressor = hvd_fec.TwoBit()
    token, ctx = compressor.compress(tf.constant(gradient(RANK, 0)))
    reduced = hvd._allreduce(token, op=getattr(hvd, op))
    with pytest.raises(ERRORS, match="linear reduction"):
        compressor.decompress(reduced, ctx)


def test_process_set(even):
    if not even.included() or even.size() < 2:
        return
    compressor = hvd_fec.TwoBit(0.5)
    rule = TwoBitRule(0.5, even.ranks)
    reduce = tf.function(
        lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Sum, process_set=even)
    )
    for step in range(2):
        result = reduce(tf.constant(gradient(RANK, step)))
        np.testing.assert_array_equal(
            result, rule.step([gradient(r, step) for r in even.ranks]) * 0.5
        )


@pytest.mark.parametrize("make", [lambda: hvd_fec.Ternary("threshold"), hvd_fec.TwoBit])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spoils_one_step_of_one_tensor(make, bad):
    compressor = make()
    reduce = tf.function(
        lambda a, b: hvd.grouped_allreduce([a, b], compression=compressor, op=hvd.Average)
    )
    reduce(tf.constant(gradient(RANK, 0)), tf.constant(gradient(RANK, 0)))
    before = {name: residual.copy() for name, residual in compressor.residuals.items()}
    broken = gradient(RANK, 1)
    if RANK == SIZE - 1:
        broken[3, 4] = bad
    results = reduce(tf.constant(broken), tf.constant(gradient(RANK, 1)))
    assert np.isnan(results[0]).all() and np.isfinite(results[1]).all()
    changed = [
        name for name, residual in compressor.residuals.items() if (residual != before[name]).any()
    ]
    assert len(changed) == 1
    results = reduce(tf.constant(gradient(RANK, 2)), tf.constant(gradient(RANK, 2)))
    assert np.isfinite(results).all()
    assert all(np.isfinite(residual).all() for _, residual in compressor.residuals.items())


def test_zeros():
    for rounding in ("threshold", "stochastic"):
        compressor = hvd_fec.Ternary(rounding)
        result = hvd.allreduce(tf.zeros(2000), compression=compressor, name="zeros")
        assert not result.numpy().any()


# ---- disagreement --------------------------------------------------------------------------------


def test_settings_that_differ():
    compressor = hvd_fec.TwoBit(0.5 + RANK)
    with pytest.raises(ERRORS, match="different settings"):
        hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=compressor, name="g")


@pytest.mark.parametrize("method", ["_survey", "_pack"])
def test_failure_of_one_rank_reaches_all(monkeypatch, method):
    compressor = hvd_fec.TwoBit(0.5)
    reduce = tf.function(lambda x: hvd.allreduce(x, compression=compressor, op=hvd.Sum))
    wanted = TwoBitRule(0.5).step([gradient(r, 0) for r in ALL]) * 0.5

    def broken(*args):
        raise OSError("no such luck")

    if RANK == 0:
        monkeypatch.setattr(compressor, method, broken)
    with pytest.raises(ERRORS, match="no such luck" if RANK == 0 else "failed on"):
        reduce(tf.constant(gradient(RANK, 0)))
    monkeypatch.undo()
    compressor.reset()
    np.testing.assert_array_equal(reduce(tf.constant(gradient(RANK, 0))), wanted)


def test_words_that_are_not_sums(monkeypatch):
    compressor = hvd_fec.TwoBit(0.5)
    add_up = exchange.add_up

    def broken(words, name, process_set):
        total = add_up(words, name, process_set)
        return total if name.endswith("survey") else tf.fill(tf.shape(total), tf.int64.max)

    monkeypatch.setattr(exchange, "add_up", broken)
    monkeypatch.setattr(compression, "gathers", lambda ranks: False)
    with pytest.raises(ERRORS, match="another rank|out of range"):
        hvd.allreduce(tf.constant(gradient(RANK, 0)), compression=compressor, name="g")


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize(
    "make", [hvd_fec.Ternary, lambda: hvd_fec.Ternary("threshold"), lambda: hvd_fec.TwoBit(0.02)]
)
def test_keras_trains(make, groups):
    keras.utils.set_random_seed(1)
    compressor = make()
    model = keras.Sequential(
        [keras.layers.Input(32), keras.layers.Dense(64, "relu"), keras.layers.Dense(32)]
    )
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.5), compression=compressor, groups=groups
    )
    model.compile(optimizer, "mse")
    x = np.random.default_rng(RANK).standard_normal((512, 32)).astype(np.float32)
    history = model.fit(x, np.tanh(x[:, ::-1]), 32, epochs=3, verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]
    same_everywhere(*model.get_weights())
    assert compressor.stats.steps == 48


def test_defaults_by_name():
    assert isinstance(hvd_fec.Compression.ternary, hvd_fec.Ternary)
    assert hvd_fec.Compression.twobit is hvd_fec.Compression.twobit
    assert hvd_fec.Compression.twobit.get_config() == {"threshold": 0.5, "min_size": 1024}


@pytest.mark.parametrize(
    "kind, kwargs, message",
    [
        (hvd_fec.TwoBit, dict(threshold=0), "positive"),
        (hvd_fec.TwoBit, dict(threshold=float("nan")), "positive"),
        (hvd_fec.TwoBit, dict(threshold="0.5"), "positive"),
        (hvd_fec.TwoBit, dict(threshold=True), "positive"),
        (hvd_fec.TwoBit, dict(min_size=-1), "min_size"),
        (hvd_fec.Ternary, dict(rounding="nearest"), "rounding"),
        (hvd_fec.Ternary, dict(sparsity=0), "sparsity"),
        (hvd_fec.Ternary, dict(sparsity=2), "sparsity"),
        (hvd_fec.Ternary, dict(clip_sigma=0), "clip_sigma"),
        (hvd_fec.Ternary, dict(seed=0.5), "seed"),
    ],
)
def test_arguments(kind, kwargs, message):
    with pytest.raises(ValueError, match=message):
        kind(**kwargs)


# ---- the last rank joins -------------------------------------------------------------------------


def test_a_rank_has_joined():
    compressor = hvd_fec.TwoBit(threshold=1.0, min_size=0)
    ternary = hvd_fec.Ternary("threshold", min_size=0)
    if RANK < SIZE - 1:
        present = range(SIZE - 1)
        rules = [TwoBitRule(1.0, present) for _ in LENGTHS]
        for step in range(2):
            results = hvd.grouped_allreduce(
                [tf.constant(gradient(RANK, step, n, n)) for n in LENGTHS],
                compression=compressor, op=hvd.Sum, name="joined",
            )  # fmt: skip
            for n, rule, result in zip(LENGTHS, rules, results):
                wanted = rule.step([gradient(r, step, n, n) for r in present])
                np.testing.assert_array_equal(result, wanted)
        mine = tf.constant(gradient(RANK, 3))
        mean = hvd.allreduce(mine, compression=compressor, op=hvd.Average, name="mean")
        wanted = TwoBitRule(1.0, present).step([gradient(r, 3) for r in present]) / SIZE
        np.testing.assert_allclose(mean, wanted, rtol=1e-6)  # as none: all ranks count
        assert np.isfinite(hvd.allreduce(mine, compression=ternary, name="ternary")).all()
    hvd.join()
    after = hvd.allreduce(tf.constant(gradient(RANK, 4)), compression=ternary, name="after")
    same_everywhere(after)
    assert survey(after.numpy()).peak > 0
