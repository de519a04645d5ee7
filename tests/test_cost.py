"""The cost model: limits that follow from the algorithms, and the rule for two shots."""

import pytest

from hvd_fec import cost
from hvd_fec.cost import Network, predict, received_bytes, two_shot_pays

SIZES = [9_000_000, 1_000_000, 10_000]
DENSE = 4 * sum(SIZES)
GIGABIT = Network(125e6)


def test_two_shots_pay_for_many_ranks_and_bytes():
    assert not any(two_shot_pays(2, 4 * 10**k) for k in range(4, 12))
    assert not two_shot_pays(4, 5_300_000) and two_shot_pays(4, 5_400_000)
    assert not two_shot_pays(8, 1_500_000) and two_shot_pays(8, 1_600_000)


def test_bytes_of_the_algorithms():
    assert received_bytes("none", SIZES, 2) == DENSE
    assert received_bytes("fp16", SIZES, 4) == 0.75 * DENSE
    assert received_bytes("fec", SIZES, 2, ratio=20) == pytest.approx(DENSE / 20)
    # 8/40 byte a value gathered from each other rank; 15 values a word in a ring of 8
    assert received_bytes("ternary", SIZES, 2) == pytest.approx(DENSE / 20, rel=0.01)
    assert received_bytes("twobit", SIZES, 8) == pytest.approx(1.75 * 8 * DENSE / 4 / 15, rel=0.01)


@pytest.mark.parametrize("workers", [8, 64, 512])
def test_two_shots_stay_below_two_payloads(workers):
    payload = DENSE / 20
    headers = 2 * workers * len(SIZES) * 64
    assert received_bytes("fec", SIZES, workers, ratio=20) < 2 * payload + headers


@pytest.mark.parametrize("compressor", cost.COMPRESSORS)
def test_more_of_anything_takes_longer(compressor):
    base = predict(compressor, SIZES, 4, GIGABIT).seconds
    assert predict(compressor, [2 * s for s in SIZES], 4, GIGABIT).seconds > base
    assert predict(compressor, SIZES * 2, 4, GIGABIT).seconds > base
    assert predict(compressor, SIZES, 4, Network(12.5e6)).seconds > base
    assert predict(compressor, SIZES, 4, Network(125e6, 1e-3)).seconds > base
    assert predict(compressor, SIZES, 4, Network(125e6, shared=True)).seconds > base
    assert predict(compressor, SIZES, 4, GIGABIT, crowding=2).seconds > base
    assert predict(compressor, SIZES, 64, GIGABIT).seconds > base


def test_exchanges_of_fec():
    auto = {n: predict("fec", SIZES, n, GIGABIT).seconds for n in (2, 16)}
    assert predict("fec", SIZES, 2, GIGABIT, exchange="allgather").seconds == auto[2]
    assert predict("fec", SIZES, 16, GIGABIT, exchange="twoshot").seconds == auto[16]
    # The rule takes this ratio: then what it takes is the faster one.
    for n, other in ((2, "twoshot"), (16, "allgather")):
        assert predict("fec", SIZES, n, GIGABIT, exchange=other).seconds > auto[n]
    assert received_bytes("fec", SIZES, 16, 20, "allgather") == 15 * DENSE / 20
    for compressor in cost.COMPRESSORS[:2] + cost.COMPRESSORS[3:]:
        one, two = (predict(compressor, SIZES, 8, GIGABIT, exchange=e) for e in cost.EXCHANGES[1:])
        assert one == two


def test_a_slow_network_decides():
    slow = Network(1e6, latency=0)
    step = predict("none", SIZES, 2, slow)
    assert step.transfer == pytest.approx(DENSE / 1e6, rel=1e-3)
    assert step.seconds == pytest.approx(step.transfer, rel=0.01)
    fec = predict("fec", SIZES, 2, slow, ratio=100)
    assert step.seconds / fec.seconds == pytest.approx(100, rel=0.1)


def test_one_worker_moves_nothing():
    for compressor in cost.COMPRESSORS:
        step = predict(compressor, SIZES, 1, GIGABIT)
        assert step.bytes == step.latency == step.transfer == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"compressor": "zip"}, "compressor must be one of none"),
        ({"workers": 0}, "workers \\(0\\)"),
        ({"ratio": 0.0}, "ratio \\(0.0\\)"),
        ({"network": Network(0.0)}, "bandwidth \\(0.0\\)"),
        ({"exchange": "ring"}, "exchange must be one of auto"),
        ({"crowding": -1.0}, "crowding \\(-1.0\\)"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"compressor": "fec", "sizes": SIZES, "workers": 2, "network": GIGABIT, **change}
    with pytest.raises(ValueError, match=message):
        predict(**arguments)
