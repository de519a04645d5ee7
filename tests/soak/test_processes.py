"""Fifty times Ctrl-C, and the faults that ``tests/test_interrupted.py`` leaves out."""

import random
import time

import pytest
from test_interrupted import Job, check_fault

TIMES = 50


@pytest.mark.parametrize("fault", ["raise", "stop"])
def test_fault(tmp_path, fault):
    print(check_fault(tmp_path, fault))


def test_ctrl_c_at_random_times(tmp_path):
    """Every job goes on from the checkpoint of the one before."""
    rng = random.Random(0)
    begun = time.monotonic()
    job = Job(tmp_path)
    job.wait_for("rank 1: step 1\n")
    start_up = time.monotonic() - begun
    trained, restored, again = 0, 0, 0
    for _ in range(TIMES):
        time.sleep(rng.uniform(0, 1.5 * start_up))  # some while starting, some in training
        starting = not job.said()
        job.interrupt()
        # Horovod's launcher may swallow it while it starts; a person would press it again.
        while not job.ends_within(30):
            assert starting, job.said()[-5000:]
            job.interrupt()
            again += 1
        output = job.finish()
        trained += "rank 1: step" in output
        restored += output.count(": restored")
        assert job.check_checkpoint() == 2
        job = Job(tmp_path)
    job.wait_for("rank 1: step")
    job.interrupt()
    job.finish()
    print(
        f"{TIMES} interrupts, {trained} of them in training, {restored} ranks restored, "
        f"{again} times Ctrl-C again"
    )
    assert again < TIMES / 4
    assert trained > TIMES / 10 and restored >= 2 * (trained - 1)
