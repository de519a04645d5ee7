"""What ReplicaCheck says; tests/parallel/callbacks.py has what it finds."""

import pytest

callbacks = pytest.importorskip("hvd_fec.callbacks", exc_type=ImportError)

CASES = {
    "pair": ([{"w": b"a"}, {"w": b"b"}], [0, 1], "w: rank 0 and rank 1 differ"),
    "one": (
        [{"w": b"a"}, {"w": b"b"}, {"w": b"a"}],
        [0, 2, 4],
        "w: rank 2 differs from the",
    ),
    "two": ([{"w": x} for x in (b"a", b"b", b"a", b"c", b"a")], range(5), "ranks 1, 3 differ from"),
    "halves": ([{"w": x} for x in (b"a", b"b", b"a", b"b")], range(4), "ranks 0, 2 and ranks 1, 3"),
    "missing": ([{"w": b"a", "v": b"a"}, {"w": b"a"}], [0, 1], "v: rank 0 and rank 1 differ"),
    "order": ([{"w": b"a", "v": b"b"}, {"v": b"b", "w": b"a"}], [0, 1], "in another order"),
    "many": ([{str(i): bytes([r]) for i in range(12)} for r in (0, 1)], [0, 1], "... and 2 more"),
}


@pytest.mark.parametrize("replicas, ranks, text", CASES.values(), ids=CASES)
def test_explanation(replicas, ranks, text):
    assert text in callbacks._explain(replicas, list(ranks), 7)
