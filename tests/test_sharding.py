"""The contract of shards (equal, disjoint, complete, in proportion), and how near they come."""

import gzip
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_fec import sharding
from hvd_fec.sharding import (
    contiguous_shard,
    directory_labels,
    file_shard,
    image_features,
    random_shard,
    shard_report,
    stratified_shard,
)

quick = settings(max_examples=60, deadline=None)


def every_shard(labels, size, **options):
    return [stratified_shard(labels, rank, size, **options) for rank in range(size)]


def check_contract(shards, n, drop_last):
    """Equal lengths; disjoint and all but the remainder, or complete with fewest repeats."""
    size = len(shards)
    assert {s.dtype for s in shards} == {np.dtype(np.int64)}
    assert {s.base for s in shards} == {None}  # no shard keeps the whole deal in memory
    assert {len(s) for s in shards} == {n // size if drop_last else -(-n // size)}
    times = np.bincount(np.concatenate(shards), minlength=n)
    assert len(times) == n
    if drop_last:
        assert times.max() <= 1  # with the lengths: all but n % size are dealt
    else:
        assert times.min() >= 1  # with the lengths: -n % size repeats
    return times


def check_proportions(shards, labels):
    size = len(shards)
    for label in np.unique(labels):
        ideal = (labels == label).sum() / size
        off = max(abs((labels[s] == label).sum() - ideal) for s in shards)
        assert off < 1 if len(labels) % size == 0 else off <= 1


@st.composite
def problems(draw):
    """Labels in random order, with classes around the number of shards and far from it."""
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    labels = np.repeat(draw(st.permutations(range(len(counts)))), counts)
    np.random.default_rng(draw(st.integers(0, 99))).shuffle(labels)
    size = draw(st.integers(1, min(len(labels), 24)))
    return labels, size


# --- The contract -------------------------------------------------------------------------------


@quick
@given(problems(), st.integers(0, 2**70), st.integers(0, 2**40), st.booleans(), st.integers(0, 3))
def test_contract(problem, seed, epoch, drop_last, columns):
    labels, size = problem
    features = None
    if columns:
        features = np.random.default_rng(seed).normal(size=(len(labels), columns))
    shards = every_shard(
        labels, size, features=features, seed=seed, epoch=epoch, drop_last=drop_last
    )
    check_contract(shards, len(labels), drop_last)
    check_proportions(shards, labels)


def partitions(n, largest):
    if n == 0:
        yield []
    for first in range(min(n, largest), 0, -1):
        for others in partitions(n - first, first):
            yield [first] + others


@pytest.mark.parametrize("drop_last", [True, False])
def test_every_small_case_can_be_dealt(drop_last):
    for n in range(1, 10):
        for counts in partitions(n, n):
            labels = np.repeat(np.arange(len(counts)), counts)
            for size in range(1, n + 1):
                shards = every_shard(labels, size, drop_last=drop_last)
                check_contract(shards, n, drop_last)
                check_proportions(shards, labels)


@quick
@given(problems(), st.booleans())
def test_without_labels(problem, drop_last):
    labels, size = problem
    shards = every_shard(None, size, features=labels, drop_last=drop_last)
    check_contract(shards, len(labels), drop_last)


def test_a_thousand_classes():
    labels = np.random.default_rng(0).zipf(1.3, 200_000) % 1000
    shards = every_shard(labels, 48)
    check_contract(shards, len(labels), True)
    counts = np.array([np.bincount(labels[s], minlength=1000) for s in shards])
    assert np.abs(counts - np.bincount(labels) / 48).max() <= 1


def test_a_lone_sample_is_never_dropped_while_others_can_be():
    labels = np.array([0] * 16 + [1])  # 16 divides by 4: of leftovers there is only the lone one
    for epoch in range(20):
        assert 16 in np.concatenate(every_shard(labels, 4, epoch=epoch))


def test_another_sample_is_left_out_each_time():
    left_out = set()
    for epoch in range(100):
        left_out |= set(range(10)).difference(*every_shard([5] * 10, 3, epoch=epoch))
    assert left_out == set(range(10))


def test_wrapping_repeats_different_samples_while_there_are_enough():
    for size in range(2, 30):
        times = check_contract(every_shard(np.arange(29) % 3, size, drop_last=False), 29, False)
        assert times.max() <= 2


def test_ranks_derive_the_same_deal_and_epochs_another():
    labels = np.arange(120) % 5
    shards = every_shard(labels, 4, seed=3, epoch=7)
    for rank, shard in enumerate(shards):
        again = stratified_shard(labels, rank, 4, seed=3, epoch=7)
        np.testing.assert_array_equal(shard, again)
        for change in ({"seed": 4}, {"epoch": 8}):
            other = stratified_shard(labels, rank, 4, **{"seed": 3, "epoch": 7, **change})
            assert set(other) != set(shard)
    one = [stratified_shard(labels, 0, 1, epoch=e) for e in range(2)]
    assert (one[0] != one[1]).any() and set(one[0]) == set(one[1])


@pytest.mark.parametrize("features", [None, np.arange(40.0)])
def test_every_sample_is_as_likely_in_every_shard(features):
    labels = np.repeat([0, 1, 2], [24, 13, 3])
    seen, epochs = np.zeros((4, 40)), 300
    for epoch in range(epochs):
        for rank in range(4):
            seen[rank, stratified_shard(labels, rank, 4, features=features, epoch=epoch)] += 1
    deviation = np.sqrt(epochs * 0.25 * 0.75)
    assert np.abs(seen - epochs / 4).max() < 5 * deviation


def test_the_order_inside_a_shard_is_random():
    labels = np.repeat([0, 1], 500)
    shard = stratified_shard(labels, 0, 2)
    assert abs(labels[shard[:250]].mean() - 0.5) < 0.15
    assert abs(np.corrcoef(shard, np.arange(500))[0, 1]) < 0.2


# --- Labels of every kind -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        np.array([-128, 127, 0], np.int8),
        np.array([2**64 - 1, 2**64 - 3, 2**64 - 2], np.uint64),
        np.array([0, 2**64 - 1, 5], np.uint64),
        np.array([-(2**63), 2**63 - 1, 0]),
        np.array([-(2**63), -(2**63) + 65535, -(2**63) + 9]),
        np.array([70_000, 4464, 70_001]),
        np.array([True, False, True]),
        np.array(["cat", "ant", "bee"]),
        np.array([b"cat", b"ant", b"bee"]),
        np.array(["cat", "ant", "bee"], object),
    ],
    ids=lambda v: f"{v.dtype}:{v[0]}",
)
def test_labels_of_any_kind_are_classes(values):
    labels = values[np.random.default_rng(1).integers(0, 3, 50)]
    shards = every_shard(labels, 4)
    check_contract(shards, 50, True)
    check_proportions(shards, labels)
    report = shard_report(labels, 4)
    expected = labels.tolist()
    assert report.classes.tolist() == sorted(set(expected))
    assert report.whole_counts.tolist() == [expected.count(c) for c in report.classes.tolist()]


def test_lists_are_labels_too():
    np.testing.assert_array_equal(
        stratified_shard([2, 1, 2, 1], 0, 2), stratified_shard(np.array([2, 1, 2, 1]), 0, 2)
    )


# --- Balance of features ------------------------------------------------------------------------


def distances(report):
    """Mean squares over shards: shift of each mean, relative error of each variance."""
    shift = np.square(report.mean_shift).mean(axis=0)
    return np.concatenate([shift, np.square(report.variance_ratio - 1).mean(axis=0)])


def gain(labels, features, size, seeds=5):
    """How many times nearer to the whole than random shards, for each mean and variance."""
    random, ours = (
        sum(
            distances(shard_report(labels, size, features=features, sharder=sharder, seed=seed))
            for seed in range(seeds)
        )
        for sharder in ("random", "stratified")
    )
    return np.sqrt(random / np.maximum(ours, 1e-30))


def synthetic(n=12_000):
    """Classes of unequal size and spread, two dependent skewed features."""
    rng = np.random.default_rng(5)
    labels = rng.choice(10, n, p=np.arange(1, 11) / 55)
    mean = rng.gamma(2 + labels, 1.0)
    return labels, np.stack([mean, np.sqrt(mean) * rng.lognormal(0, 0.3, n)], axis=1)


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("with_labels", [True, False])
def test_means_and_variances_are_five_times_closer(size, with_labels):
    labels, features = synthetic()
    assert gain(labels if with_labels else None, features, size).min() > 5


def test_nothing_but_the_remainder_stands_in_the_way():
    # Leftovers of the classes are one sample in thirty here. If only the others were balanced,
    # these would keep the gain below 6.
    labels, features = synthetic(64 * 170)
    assert gain(labels, features, 64).min() > 20


@pytest.mark.parametrize("size", [2, 8, 64])
def test_regression_targets_are_balanced(size):
    _, features = synthetic()
    targets = features[:, 0].astype(np.float32)
    assert gain(targets, None, size).min() > 5
    # All of their distribution, not only two moments: every shard has one of `size` neighbours.
    ordered = np.sort(targets)
    for rank in {0, size - 1}:
        shard = stratified_shard(targets, rank, size)
        steps = np.searchsorted(ordered, np.sort(targets[shard])) / size - np.arange(len(shard))
        # A few samples are out of line: the remainder that is left out, and those swapped.
        assert np.abs(steps).mean() < 2


def test_many_samples_on_two_ranks():
    # The gap that dealing leaves grows with the square root of the number of samples.
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400_000, 2))
    assert gain(rng.integers(0, 10, 400_000), features, 2, seeds=3).min() > 5


def mnist(name):
    folder = os.environ.get("HVD_FEC_DATA_DIR")
    for place in [Path(folder) / "mnist", Path(folder)] if folder else []:
        if (place / name).exists():
            raw = gzip.decompress((place / name).read_bytes())
            shape = np.frombuffer(raw, ">i4", raw[3], 4)
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    pytest.skip("HVD_FEC_DATA_DIR has no MNIST")


@pytest.mark.parametrize("size", [2, 8, 64])
def test_means_and_variances_are_five_times_closer_on_mnist(size):
    labels = mnist("train-labels-idx1-ubyte.gz")
    features = image_features(mnist("train-images-idx3-ubyte.gz"))
    assert gain(labels, features, size, seeds=20).min() > 5
    for seed in range(5):
        counts = shard_report(labels, size, features=features, seed=seed).counts
        assert np.abs(counts - np.bincount(labels) / size).max() <= 1


@pytest.mark.parametrize(
    "feature",
    [np.ones(60), np.arange(60), np.arange(60) * 1e306, np.arange(60) % 2 == 0, np.zeros((60, 3))],
    ids=["constant", "integer", "huge", "bool", "flat"],
)
def test_odd_features(feature):
    with np.errstate(all="raise"):
        shards = every_shard(np.arange(60) % 7, 4, features=feature)
    check_contract(shards, 60, True)
    check_proportions(shards, np.arange(60) % 7)


DIGEST = """
import hashlib, numpy as np
from hvd_fec import sharding
x = np.random.default_rng(0).random(size=(3001, 3))
s = sharding.stratified_shard(np.arange(3001) % 7, 1, 8, features=x, batch_size=16)
# The last bits of these seldom change a deal, so that the deal alone would hide most faults.
m = np.array(sharding._moments(x))
print(hashlib.sha256(s.tobytes() + m.tobytes()).hexdigest())
"""


def test_processors_with_other_instructions_come_to_the_same_deal():
    plain = {
        "NPY_DISABLE_CPU_FEATURES": "FMA3 AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL "
        "AVX512_ICL",
        "OPENBLAS_CORETYPE": "Prescott",
    }
    digests = []
    for settings_ in ({}, plain):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIGEST],
            env={**os.environ, **settings_, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(done.stdout)
    assert len(digests[0].strip()) == hashlib.sha256().digest_size * 2
    assert digests[0] == digests[1]


# --- Batches ------------------------------------------------------------------------------------


@quick
@given(problems(), st.integers(1, 30), st.integers(0, 9), st.booleans())
def test_batches_have_the_proportions_of_the_shard(problem, batch_size, epoch, with_features):
    labels, size = problem
    features = np.sin(np.arange(len(labels))) if with_features else None
    options = dict(features=features, epoch=epoch)
    batch_size = min(batch_size, len(labels) // size)
    for rank in {0, size - 1}:
        plain = stratified_shard(labels, rank, size, **options)
        shard = stratified_shard(labels, rank, size, batch_size=batch_size, **options)
        np.testing.assert_array_equal(np.sort(shard), np.sort(plain))
        full, short = divmod(len(shard), batch_size)
        bound = 1 + 1 / full if short else 1
        for i in range(0, len(shard), batch_size):
            batch = labels[shard[i : i + batch_size]]
            for label in np.unique(labels):
                ideal = (labels[shard] == label).sum() * len(batch) / len(shard)
                assert abs((batch == label).sum() - ideal) < bound


def test_global_batches_are_representative():
    # Each rank's batch is off by a rounding. If all ranks rounded alike, the global batch would
    # be off by up to 32 of a class; independent roundings leave the square root of that.
    labels = np.random.default_rng(0).integers(0, 10, 32 * 914)
    shards = every_shard(labels, 32, batch_size=36)
    ideal = np.bincount(labels) / 914
    for start in range(0, 914, 36):
        batch = np.concatenate([s[start : start + 36] for s in shards])
        off = np.bincount(labels[batch], minlength=10) - ideal * len(batch) / 32
        assert np.sqrt(np.square(off).mean()) < np.sqrt(32)


def test_batches_are_balanced_in_the_first_feature_too():
    features = np.random.default_rng(0).normal(size=4000)
    options = dict(features=features, batch_size=50)
    spread = [
        features[stratified_shard(None, rank, 4, **options)].reshape(20, 50).mean(axis=1).std()
        for rank in range(4)
    ]
    assert max(spread) < 0.25 / np.sqrt(50)  # random batches: 1 / sqrt(50)


def test_batches_change_with_the_epoch_and_are_shuffled_inside():
    labels = np.repeat([0, 1], 512)
    batches = [
        stratified_shard(labels, 0, 1, batch_size=64, epoch=e).reshape(16, 64) for e in range(2)
    ]
    assert {frozenset(b) for b in batches[0]}.isdisjoint(frozenset(b) for b in batches[1])
    assert abs(labels[batches[0][:, :32]].mean() - 0.5) < 0.2


# --- The other sharders -------------------------------------------------------------------------


@quick
@given(st.integers(1, 200), st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_contract_of_random_and_contiguous_shards(n, size, seed, drop_last):
    size = min(n, size)
    random = [random_shard(n, r, size, seed, drop_last=drop_last) for r in range(size)]
    check_contract(random, n, drop_last)
    pieces = [contiguous_shard(n, r, size, drop_last) for r in range(size)]
    check_contract(pieces, n, drop_last)
    together = np.concatenate(pieces)
    np.testing.assert_array_equal(together, np.arange(len(together)) % n)


def test_random_shards_are_random():
    a = random_shard(1000, 0, 2)
    np.testing.assert_array_equal(a, random_shard(1000, 0, 2, 0, 0))
    assert set(a) != set(random_shard(1000, 0, 2, epoch=1))
    assert set(a) != set(random_shard(1000, 0, 2, seed=1))
    assert 150 < (np.sort(a) < 500).sum() < 350
    assert (np.diff(a) < 0).any()


# --- Errors -------------------------------------------------------------------------------------


LABELS = np.arange(20) % 4
HOLE = np.where(np.arange(20) == 7, np.nan, 1.0)


@pytest.mark.parametrize(
    "labels, rank, size, options, message",
    [
        (LABELS, 0, 21, {}, "20 samples cannot be dealt to 21 ranks; use at most 20"),
        (LABELS, 0, 21, {"drop_last": False}, "use at most 20"),
        (LABELS, 4, 4, {}, "rank is 4 but ranks go from 0 to size - 1 = 3"),
        (LABELS, -1, 4, {}, "rank must be at least 0, not -1"),
        (LABELS, 0.0, 4, {}, "rank must be an integer, not 0.0"),
        (LABELS, 0, 0, {}, "size must be at least 1, not 0"),
        (LABELS, 0, "4", {}, "size must be an integer, not '4'"),
        (LABELS, 0, 4, {"seed": -1}, "seed must be at least 0"),
        (LABELS, 0, 4, {"seed": None}, "seed must be an integer, not None"),
        (LABELS, 0, 4, {"epoch": 1.5}, "epoch must be an integer, not 1.5"),
        (LABELS, 0, 4, {"batch_size": 0}, "batch_size must be at least 1"),
        (LABELS, 0, 4, {"batch_size": 6}, "batch_size is 6 but a shard has only 5"),
        (LABELS.reshape(20, 1), 0, 4, {}, r"labels.ravel\(\) for one column"),
        (np.eye(20), 0, 4, {}, r"labels.argmax\(axis=1\) for one-hot"),
        (np.array(3), 0, 1, {}, r"labels must have shape \(N,\), not \(\)"),
        (LABELS * 1j, 0, 4, {}, "labels must be integers, strings, bools or floats, not complex"),
        (np.array(["a", None]), 0, 2, {}, "labels must be integers, strings"),
        (HOLE, 0, 4, {}, "labels of 1 samples are NaN or infinite, first of sample 7"),
        ([], 0, 1, {}, "there are no samples"),
        (None, 0, 4, {}, "give labels, features or both; random_shard needs neither"),
        (LABELS, 0, 4, {"features": HOLE}, "features of 1 samples are NaN or infinite.* sample 7"),
        (LABELS, 0, 4, {"features": np.full(20, np.inf)}, "features of 20 samples are NaN"),
        (LABELS, 0, 4, {"features": np.ones(19)}, "20 labels but features of 19 samples"),
        (LABELS, 0, 4, {"features": np.ones((20, 2, 2))}, r"shape \(N,\) or \(N, F\)"),
        (LABELS, 0, 4, {"features": np.ones((20, 0))}, r"shape \(N,\) or \(N, F\)"),
        (LABELS, 0, 4, {"features": np.array(["a"] * 20)}, "features must be real numbers"),
    ],
)
def test_stratified_shard_errors(labels, rank, size, options, message):
    with pytest.raises(ValueError, match=message):
        stratified_shard(labels, rank, size, **options)


@pytest.mark.parametrize("sharder", [random_shard, contiguous_shard])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, 0, 4), "3 samples cannot be dealt to 4 ranks"),
        ((3, 2, 2), "rank is 2 but"),
        ((0, 0, 1), "n must be at least 1"),
    ],
)
def test_other_sharders_errors(sharder, arguments, message):
    with pytest.raises(ValueError, match=message):
        sharder(*arguments)


# --- The report ---------------------------------------------------------------------------------


def worked_example():
    """Whole: 2 a, 2 b, feature 0 2 4 6 (mean 3, variance 5), and a constant feature."""
    features = np.array([[0, 7], [2, 7], [4, 7], [6, 7]])
    return shard_report(["a", "a", "b", "b"], features=features, shards=[[0, 1], [0, 2, 3]])


def test_report_of_a_worked_example():
    report = worked_example()
    np.testing.assert_array_equal(report.lengths, [2, 3])
    np.testing.assert_array_equal(report.counts, [[2, 0], [1, 2]])
    np.testing.assert_allclose(report.class_distance, [1 / 2, 1 / 6])
    np.testing.assert_allclose(report.mean, [[1, 7], [10 / 3, 7]])
    np.testing.assert_allclose(report.mean_shift, [[-2 / 5**0.5, 0], [1 / 3 / 5**0.5, 0]])
    np.testing.assert_allclose(report.variance_ratio, [[1 / 5, 1], [56 / 9 / 5, 1]])


def test_report_as_text():
    lines = str(worked_example()).splitlines()
    assert lines[0] == "given shards: 2, classes: 2"
    assert lines[1].split()[:5] == "shard samples class distance shift(feature".split()
    assert lines[2].split() == "0 2 0.50000 -0.89443 0.20000 +0.00000 1.00000 2 0".split()
    assert lines[4].split() == "worst 0.50000 -0.89443 0.20000 +0.00000 1.00000 2 0".split()
    assert len(lines) == 5
    long = str(shard_report(np.arange(300) % 20, 30)).splitlines()
    assert len(long) == 2 + 20 + 2 and long[-2] == "... and 10 more shards"
    assert "n(0)" not in long[1]  # too many classes for a table


@pytest.mark.parametrize("sharder", ["random", "contiguous", "stratified"])
def test_report_makes_the_shards(sharder):
    features = np.arange(40.0)
    make = {
        "random": lambda rank: random_shard(40, rank, 3, 1, 2),
        "contiguous": lambda rank: contiguous_shard(40, rank, 3),
        "stratified": lambda rank: stratified_shard(
            LABELS.repeat(2), rank, 3, features=features, seed=1, epoch=2
        ),
    }[sharder]
    options = dict(labels=LABELS.repeat(2), features=features)
    report = shard_report(size=3, sharder=sharder, seed=1, epoch=2, **options)
    by_hand = shard_report(shards=[make(rank) for rank in range(3)], **options)
    np.testing.assert_array_equal(report.counts, by_hand.counts)
    np.testing.assert_allclose(report.mean, by_hand.mean)
    assert str(report).startswith(f"{sharder} shards: 3")


def test_report_of_regression_targets():
    report = shard_report(np.linspace(0, 1, 60), 3, features=np.arange(60))
    assert report.feature_names == ("label", "feature 0")
    assert report.counts.shape == (3, 0) and report.mean.shape == (3, 2)
    assert "shift(label)" in str(report) and "class distance" not in str(report)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "give size"),
        ({"size": 2, "sharder": "even"}, "'stratified', 'random' or 'contiguous', not 'even'"),
        ({"size": 3, "shards": [[0], [1]]}, "size is 3 but there are 2 shards"),
        ({"shards": []}, "shards is empty"),
        ({"shards": [[0], [20]]}, "shard 1 has an index outside of 0 to 19"),
        ({"shards": [[-1]]}, "shard 0 has an index outside"),
        ({"shards": [[0.5]]}, "shard 0 must be a 1-D array of at least one index"),
        ({"shards": [[0], []]}, "shard 1 must be a 1-D array of at least one index"),
        ({"size": 21}, "use at most 20"),
    ],
)
def test_report_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_report(LABELS, **arguments)


class Axes:
    """What ShardReport.plot needs of matplotlib axes."""

    def __init__(self):
        self.lines = {}

    def plot(self, x, y, style, label):
        self.lines[label] = list(y)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_plot_into_axes():
    report = worked_example()
    axes = Axes()
    assert report.plot(axes) is axes
    assert set(axes.lines) == {
        "class distance",
        "feature 0: |mean shift|",
        "feature 0: |variance ratio - 1|",
        "feature 1: |mean shift|",
        "feature 1: |variance ratio - 1|",
    }
    np.testing.assert_allclose(axes.lines["feature 0: |variance ratio - 1|"], [0.8, 11 / 45])


def test_plot_into_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    worked_example().plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        worked_example().plot(tmp_path / "report.png")


def test_import_needs_numpy_only():
    code = (
        "import sys, hvd_fec.sharding\n"
        "print({'tensorflow', 'keras', 'horovod', 'matplotlib'} & set(sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


# --- Helpers for data sets ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(23, 5, 4), (23, 3, 4, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, bool])
def test_image_features(monkeypatch, shape, dtype):
    monkeypatch.setattr(sharding, "_CHUNK_VALUES", 200)  # several pieces, the last one shorter
    images = (np.random.default_rng(0).random(shape) * 250).astype(dtype)
    flat = images.reshape(23, -1).astype(np.float64)
    features = image_features(images)
    assert features.dtype == np.float64
    np.testing.assert_allclose(features, np.stack([flat.mean(1), flat.std(1)], 1), rtol=1e-12)
    np.testing.assert_array_equal(features, image_features(list(images)))


def test_image_features_reads_in_pieces(monkeypatch):
    monkeypatch.setattr(sharding, "_CHUNK_VALUES", 64)

    class OnDisk:
        shape, largest = (50, 4, 4), 0

        def __getitem__(self, rows):
            self.largest = max(self.largest, rows.stop - rows.start)
            return np.ones((len(range(50)[rows]), 4, 4))

    images = OnDisk()
    np.testing.assert_array_equal(image_features(images), [[1, 0]] * 50)
    assert images.largest == 4


@pytest.mark.parametrize("shape", [(4,), (4, 0, 3)])
def test_image_features_errors(shape):
    with pytest.raises(ValueError, match=r"images must have shape \(N, height, width\)"):
        image_features(np.zeros(shape))


def test_directory_labels(tmp_path):
    for name in ["b/2.png", "b/10.png", "a/x/1.png", "a/0.png", "a/.junk", ".git/x", "readme"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "empty").mkdir()
    paths, labels, names = directory_labels(tmp_path)
    inside = [Path(p).relative_to(tmp_path).as_posix() for p in paths]
    assert inside == ["a/0.png", "a/x/1.png", "b/10.png", "b/2.png"]
    assert labels.dtype == np.int64 and labels.tolist() == [0, 0, 1, 1]
    assert names == ["a", "b", "empty"]


def test_directory_labels_errors(tmp_path):
    with pytest.raises(ValueError, match="no files found as .*<class name>/<file>"):
        directory_labels(tmp_path)
    with pytest.raises(FileNotFoundError):
        directory_labels(tmp_path / "none")


@quick
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8), st.booleans())
def test_file_shard(counts, size, equal):
    size = min(size, len(counts))
    paths = [f"part-{i}" for i in range(len(counts))]
    if equal:
        counts = [1] * len(counts)
    records = dict(zip(paths, counts))
    dealt = [file_shard(paths, r, size, None if equal else counts) for r in range(size)]
    files = [f for mine, _ in dealt for f in mine]
    assert sorted(files) == sorted(paths)
    totals = [sum(records[f] for f in mine) for mine, _ in dealt]
    assert {common for _, common in dealt} == {min(totals)}
    assert max(totals) - min(totals) <= max(counts)


def test_file_shard_levels_unequal_files():
    counts = np.random.default_rng(0).integers(500, 1500, 200)
    paths = [f"part-{i}" for i in range(200)]
    common = file_shard(paths, 0, 8, counts)[1]
    assert common > 0.99 * counts.sum() / 8


def test_file_shard_does_not_depend_on_the_listing():
    paths, counts = [f"part-{i}" for i in range(20)], list(range(1, 21))
    assert file_shard(paths, 1, 3, counts) == file_shard(paths[::-1], 1, 3, counts[::-1])


@pytest.mark.parametrize("counts", [None, list(range(101, 121))])
def test_file_shard_changes_with_epoch_and_seed(counts):
    paths = [Path(f"part-{i}") for i in range(20)]
    first, _ = file_shard(paths, 0, 4, counts)
    assert isinstance(first[0], Path)
    for other in ({"epoch": 1}, {"seed": 1}):
        groups = [
            {frozenset(file_shard(paths, r, 4, counts, **options)[0]) for r in range(4)}
            for options in ({}, other)
        ]
        assert groups[0] != groups[1]
    orders = [tuple(file_shard(paths, 0, 1, counts, epoch=e)[0]) for e in range(30)]
    assert len(set(orders)) == 30
    assert any(order[0] in paths[:5] for order in orders)  # not always a large file first


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((["a", "b"], 0, 3), "2 files cannot be dealt to 3 ranks"),
        ((["a", "b"], 2, 2), "rank is 2"),
        ((["a", "a"], 0, 2), "paths has a file twice"),
        ((["a", "b"], 0, 2, [1]), "counts must be 2 positive integers"),
        ((["a", "b"], 0, 2, [1, 0]), "counts must be 2 positive integers"),
        ((["a", "b"], 0, 2, [1.0, 2.0]), "counts must be 2 positive integers"),
    ],
)
def test_file_shard_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        file_shard(*arguments)
