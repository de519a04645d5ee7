"""What of the exchange needs no second process."""

import numpy as np
import pytest

exchange = pytest.importorskip("hvd_fec.exchange", exc_type=ImportError)


def address(array):
    return array.__array_interface__["data"][0]


def test_buffers_are_used_again_when_they_are_free():
    buffers = exchange.Buffers()
    first = buffers.zeros([1000, 3, 0, 50_000])
    assert [out.size for out in first] == [1000, 3, 0, 50_000]
    assert all(out.dtype == np.float32 and not out.any() for out in first)
    assert all(address(out) % 64 == 0 for out in first)
    for out in first:
        out.fill(7)
    places = [address(out) for out in first]
    second = buffers.zeros([1000, 3, 0, 50_000])  # the first are still held
    assert not set(map(address, second)) & set(places)
    assert all((out == 7).all() for out in first)
    kept = first[3].reshape(50, 1000)  # one view of one array is enough to hold the block
    del first, out
    third = buffers.zeros([1000, 3, 0, 50_000])
    assert not set(map(address, third)) & set(places)
    del kept
    fourth = buffers.zeros([1000, 3, 0, 50_000])
    assert [address(out) for out in fourth] == places
    assert not any(out.any() for out in fourth)


def test_buffers_do_not_pile_up():
    buffers = exchange.Buffers()
    for size in range(1, 2000):
        buffers.zeros([16 * size])
    assert len(buffers._blocks) <= exchange.Buffers._KEEP


@pytest.mark.parametrize("sizes", [[0], [1], [7], [1000], [5, 0, 1, 900, 3, 3], [1] * 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_shares_cover_a_group(sizes, ranks):
    covered = [np.zeros(size, int) for size in sizes]
    shares = [exchange.share(sizes, rank, ranks) for rank in range(ranks)]
    for share in shares:
        for i, piece in share:
            assert 0 <= piece.start < piece.stop <= sizes[i]
            covered[i][piece] += 1
    assert all((c == 1).all() for c in covered)
    held = [sum(piece.stop - piece.start for _, piece in share) for share in shares]
    assert max(held) - min(held) <= 1
    assert sum(len(share) for share in shares) < len(sizes) + ranks
