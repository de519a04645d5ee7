"""Counters, windows between two readings, and samples of norms."""

import math

import numpy as np
import pytest

from hvd_fec.stats import Stats, Totals

A, B = np.zeros(6, np.float32), np.zeros((2, 2), np.float16)


def two_steps():
    stats = Stats()
    stats.bypass("c", 10)
    for kept in (1, 3):
        stats.add(["a", "b"], [A, B], 40, np.array([[kept, 7], [2, 5]]))
        stats.add_sent(1)
    return stats


def test_totals():
    stats = two_steps()
    dense = 2 * (A.nbytes + B.nbytes + 10)
    assert stats.totals() == Totals(2, dense, 2 * (41 + 10), 20, 8)
    assert stats.ratio == dense / 102 and stats.density == 0.4
    stats.reset()
    assert stats.totals() == Totals() and stats.ratio == 1.0 and stats.density == 0.0
    stats.add(["a"], [A], 5, [[1, 5]])
    assert stats.bytes_sent == 15, "what is bypassed stays known"


def test_tensors():
    tensors = two_steps().tensors()
    assert list(tensors) == ["a", "b"]
    a = tensors["a"]
    assert (a.calls, a.size, a.kept, a.bytes_sent, a.bytes_dense) == (2, 6, 4, 14, 48)
    assert a.density == 4 / 12 and a.ratio == 48 / 14 and math.isnan(a.residual_norm)


def test_windows():
    stats = two_steps()
    stats.add_seconds("encode", 2.0)
    before = stats.totals()
    stats.add(["a", "b"], [A, B], 40, np.zeros((2, 2), int))
    stats.add_seconds("encode", 0.5)
    stats.add_seconds("exchange", 0.25)
    window = stats.totals().since(before)
    assert (window.steps, window.kept, window.bytes_sent) == (1, 0, 50)
    assert (window.encode, window.exchange, window.decode) == (0.5, 0.25, 0.0)
    stats.reset()
    stats.add(["a"], [A], 5, [[1, 5]])
    assert stats.totals().since(before) == stats.totals(), "counters that were reset meanwhile"


def test_groups_are_exchanged_in_one_step():
    stats = Stats()
    for _ in range(3):
        stats.add(["a"], [A], 8, [[1, 5]])
        stats.add(["b"], [B], 8, [[1, 5]])
    assert stats.steps == 3


def test_norms_are_sampled_once_for_each_request():
    stats = two_steps()
    assert not stats.wants_norms("a") and stats.residual_norm == 0.0
    stats.sample_norms()
    assert stats.wants_norms("a") and not stats.wants_norms(None)
    stats.add_norms("a", math.nan, 1.0)
    assert stats.wants_norms("a"), "not of a step that overflowed"
    stats.add_norms("a", 3.0, 6.0)
    stats.add_norms("b", 4.0, 8.0)
    assert not stats.wants_norms("a") and stats.residual_norm == pytest.approx(2.0)
