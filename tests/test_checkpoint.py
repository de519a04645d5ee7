"""A compressor's state: out of it, into a file, and back."""

import json
import warnings

import numpy as np
import pytest

from hvd_fec import checkpoint
from hvd_fec.checkpoint import CheckpointError, MismatchError
from hvd_fec.feedback import Names, ResidualStore


class Holder:
    """As much of a compressor as the files need."""

    def __init__(self, threshold=-9, state=None):
        self.threshold = threshold
        self.state = state

    def get_config(self):
        return {"threshold": self.threshold}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def example():
    rng = np.random.default_rng(1)
    residuals = {f"kernel[{n}]": rng.standard_normal(n, np.float32) for n in (5, 1000)}
    return {
        "residuals": residuals,
        "steps": {"hvd_fec_a": 7},
        "control": [[-7.25, 1.5, 3, 2.0, False]],
    }


def same(a, b):
    assert (
        a["steps"] == b["steps"]
        and a["control"] == b["control"]
        and list(a["residuals"]) == list(b["residuals"])
    )
    for key, residual in a["residuals"].items():
        np.testing.assert_array_equal(residual, b["residuals"][key], strict=True)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "state.npz"
    checkpoint.save(path, Holder(state=example()), 1, 3)
    return path


def test_round_trip_leaves_one_file(path):
    back = Holder()
    assert checkpoint.restore(path, back, 1, 3) == 0
    same(back.state, example())
    assert list(path.parent.iterdir()) == [path]


def test_all_of_the_state_and_the_step(path):
    state = {**example(), "thresholds": {"kernel[5]": -8.3}}
    checkpoint.save(path, Holder(state=state), 1, 3, step=12)
    back = Holder()
    assert checkpoint.restore(path, back, 1, 3) == 12
    same(back.state, state)
    assert back.state["thresholds"] == state["thresholds"]


def test_torn_anywhere(path):
    """Cut off at every length, and with any byte of the larger array altered."""
    whole, back = path.read_bytes(), Holder()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.restore(path, back, 1, 3)
    spoilt = bytearray(whole)
    spoilt[whole.index(example()["residuals"]["kernel[1000]"].tobytes()) + 500] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.restore(path, back, 1, 3)
    assert back.state is None


@pytest.mark.parametrize(
    "rank, ranks, holder, text",
    [
        (0, 3, Holder(), "rank 1, not 0"),
        (1, 2, Holder(), "ranks 3, not 2"),
        (1, 3, Holder(-7), "'threshold': -9}, not {'threshold': -7"),
        (1, 3, type("Other", (Holder,), {})(), "compressor Holder, not Other"),
    ],
)
def test_another_training(path, rank, ranks, holder, text):
    with pytest.raises(MismatchError, match=text):
        checkpoint.restore(path, holder, rank, ranks)
    assert holder.state is None


def test_foreign_and_newer_files(path):
    newer = {"format": checkpoint.FORMAT, "version": 2}
    for meta, text in [(newer, "format 2, this version"), ({}, "not the state"), ([], "not the")]:
        np.savez(path, meta=np.array(json.dumps(meta)))
        with pytest.raises(CheckpointError, match=text):
            checkpoint.restore(path, Holder(), 1, 3)
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(CheckpointError, match="not the state of a compressor"):
        checkpoint.restore(path, Holder(), 1, 3)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(path, Holder(), 1, 3)


# ---- residuals and their names ------------------------------------------------------------------


def test_restored_residuals_are_taken_up_when_used():
    store = ResidualStore()
    with store.use("a", 3) as residual:
        residual[:] = 1, 2, 3
    state = store.state()
    with store.use("a", 3) as residual:
        residual[:] = 0
    other = ResidualStore()
    other.restore(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other.state()["a"].tolist() == [1, 2, 3], "not used yet, and not lost"
        with other.use("a", 3) as residual:
            assert residual.tolist() == [1, 2, 3]
            residual[0] = 9
    assert state["a"].tolist() == [1, 2, 3], "a copy"
    assert other.state()["a"].tolist() == [9, 2, 3]


@pytest.mark.parametrize("key, size, had", [("a", 4, "one of 3"), ("b", 3, "none")])
def test_what_does_not_fit_is_dropped_with_one_warning(key, size, had):
    store = ResidualStore()
    store.restore({"a": np.ones(3, np.float32)})
    with pytest.warns(RuntimeWarning, match=had), store.use(key, size) as residual:
        assert not residual.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with store.use("c", 2) as residual:
            assert not residual.any()


def handle(name, number):
    return f'<ResourceHandle(name="{name}/{number}", device="/CPU:0", container="Anonymous")>'


def test_names_do_not_depend_on_the_numbers_of_handles():
    for shift in (0, 40):
        names = Names()
        for _ in range(2):
            assert names.of(handle("d/kernel", shift + 3), 0) == "d/kernel[0]"
            assert names.of(handle("d/kernel", shift + 9), 2) == "d/kernel[2]"
            assert names.of(handle("d/kernel", shift + 21), 0) == "d/kernel[0]#2"
        assert names.of(handle("d/kernel", shift + 3), 5) == "d/kernel[0]", "in another group"
