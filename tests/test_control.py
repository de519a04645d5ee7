import math

import numpy as np
import pytest

from hvd_fec import wire
from hvd_fec.codecs import FecCodec
from hvd_fec.control import SAMPLE, Plan, ThresholdControl

N = 50_000
HEADERS = wire.HEADER.size + wire.FRAME_HEADER.size


def run(gradients, ratio, control=None):
    """Bytes of each step, with error feedback."""
    control = control or ThresholdControl(2.25)
    residual = np.zeros(N, np.float32)
    sent = []
    for g in gradients:
        control.enter("all")
        exponent = control.threshold(
            Plan(N, 4 * N / ratio, HEADERS), lambda g=g: np.abs(g + residual)
        )
        payload, above = FecCodec(exponent).encode_counting(g, residual)
        sent.append(wire.pack_frame(0, [payload]).nbytes)
        control.count(sent[-1], wire.read_header(payload).kept, above, True)
    return np.array(sent)


def series(kind, steps, rng=None):
    rng = rng or np.random.default_rng(3)
    spread = np.exp(2 * rng.standard_normal(N)) if kind == "heavy" else np.ones(N)
    lasting = 0.3 * rng.standard_normal(N)
    for step in range(steps):
        g = rng.standard_normal(N) * spread
        if kind == "falling":
            g = (g + lasting) * np.exp(-step / 50)
        yield g.astype(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "falling"])
@pytest.mark.parametrize("ratio", [10, 20, 50, 100, 300])
def test_goal_is_met_from_the_beginning(kind, ratio):
    sent = run(series(kind, 60), ratio)
    total = np.cumsum(sent) / (4 * N / ratio) / np.arange(1, 61)
    assert (abs(total[19:] - 1) < 0.1).all()


def test_the_scale_may_jump():
    # as with a loss scale that is doubled or halved
    scales = [2.0 ** (k // 10 % 3 * 3) for k in range(60)]
    sent = run((g * np.float32(s) for g, s in zip(series("heavy", 60), scales)), 50)
    assert abs(sent.mean() / (4 * N / 50) - 1) < 0.15


def test_silence_is_survived():
    quiet = [np.zeros(N, np.float32)] * 30
    sent = run([*series("heavy", 20), *quiet, *series("heavy", 40)], 50)
    assert sent[20:50].mean() <= 1.1 * 4 * N / 50  # residuals go on being sent
    assert sent.max() < 10 * 4 * N / 50
    assert abs(sent[60:].mean() / (4 * N / 50) - 1) < 0.25


def test_scale_does_not_matter():
    one, other = (ThresholdControl(2.25) for _ in range(2))
    run(series("heavy", 40), 50, one)
    run((g / 1024 for g in series("heavy", 40)), 50, other)
    assert one.exponent == pytest.approx(other.exponent + 10, abs=0.1)


def test_a_round_is_over_when_a_label_comes_again():
    control = ThresholdControl(1.0)

    def exchange(label):
        rounds = control.enter(label)
        control.threshold(Plan(N, 100.0), lambda: np.ones(N, np.float32))
        control.count(100.0, 100, 50, True)
        return rounds

    assert [exchange(label) for label in "abcabcbca"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_threshold_for_unlike_exchanges():
    control = ThresholdControl(1.0)
    small, large = np.float32([1, 2, 3, 4]), np.float32([100, 200, 300, 400])
    control.enter("small")
    control.threshold(Plan(4, 2.0), lambda: small)
    control.count(2.0, 2, 1, True)
    control.enter("large")
    # four of the eight may go: the large ones
    assert control.threshold(Plan(4, 2.0), lambda: large) == pytest.approx(math.log2(100))


def test_unusual_rounds_change_nothing():
    control = ThresholdControl(2.25)
    run(series("heavy", 30), 50, control)
    before = control.state()
    control.enter("all")
    control.threshold(Plan(N, 4 * N / 50), lambda: np.ones(N, np.float32))
    control.count(10**9, N, N, False)
    after = control.state()
    assert (after[0], after[1]) == (before[0], before[1])


def test_state_goes_on():
    gradients = list(series("heavy", 40))
    whole = ThresholdControl(2.25)
    expected = run(gradients, 50, whole)
    first = ThresholdControl(2.25)
    run(gradients[:25], 50, first)
    second = ThresholdControl(1.0)
    second.restore(first.state())
    assert second.state() == first.state()
    assert len(expected) == 40 and whole.state()[2] == 40


def test_sample_is_large_enough_for_one_value_in_a_thousand():
    rng = np.random.default_rng(5)
    values = np.abs(rng.standard_normal(SAMPLE)).astype(np.float32)
    control = ThresholdControl(1.0)
    control.enter("all")
    exponent = control.threshold(Plan(100 * SAMPLE, 0.001 * 100 * SAMPLE), lambda: values)
    assert np.mean(values >= 2.0**exponent) == pytest.approx(0.001, rel=0.1)
