"""Trainings that end in the midst of an exchange: by a dead rank, a user's error, or Ctrl-C.

``tests/soak/test_processes.py`` has more of the same.
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from test_parallel import HERE, QUIET, RUN

import hvd_fec.checkpoint

pytest.importorskip("horovod.tensorflow")
if not Path("/proc/self/environ").exists():
    pytest.skip("looks for processes in /proc", allow_module_level=True)

GLOO_TIMEOUT = 30  # seconds that a rank waits for another, unless told otherwise; also at the start


class Job:
    """``tests/parallel/endless.py`` under horovodrun, 2 ranks, in a process group of its own."""

    def __init__(self, folder, *fault):
        self.folder, self.log, self.mark = folder, folder / "log", uuid.uuid4().hex
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [RUN, "-np", "2", sys.executable, "tests/parallel/endless.py", folder, *fault],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=HERE.parent,
                env={**os.environ, **QUIET, "HVD_FEC_TEST_JOB": self.mark},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text, seconds=240):
        end = time.monotonic() + seconds
        while text not in self.said():
            assert self.process.poll() is None and time.monotonic() < end, self.said()[-5000:]
            time.sleep(0.02)

    def interrupt(self):
        """Ctrl-C: the signal goes to all of the terminal's foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends_within(self, seconds) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(self, seconds=240) -> str:
        """All that it has said; nothing of it is left running."""
        try:
            assert self.process.wait(seconds) != 0, self.said()[-5000:]
            end = time.monotonic() + 60
            while left := self.running():
                assert time.monotonic() < end, f"{left} still run\n{self.said()[-5000:]}"
                time.sleep(0.1)
        finally:
            for pid in self.running():
                os.kill(pid, signal.SIGKILL)
        return self.said()

    def running(self) -> list:
        """Processes that have inherited this job's mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # not ours, or gone
                pass
        return found

    def check_checkpoint(self) -> int:
        """How many ranks have residuals on disk; each can be restored."""
        paths = sorted(self.folder.glob("residuals-[01].npz"))
        for path in paths:
            compressor = hvd_fec.FEC(threshold=-5)
            hvd_fec.checkpoint.restore(path, compressor, int(path.stem[-1]), 2)
            ((_, residual),) = compressor.state_dict()["residuals"].items()
            assert residual.size == 64 * 48
        return len(paths)


def check_fault(folder, fault):
    """Rank 1 has the fault; rank 0 must get Horovod's error, and soon."""
    job = Job(folder, fault)
    output = job.finish()
    assert "rank 0: step 9" in output and "rank 0: step 10" not in output
    told = re.search(r"rank 0: (\w+) after ([\d.]+) s: (.*)", output)
    assert told and "Horovod has been shut down" in told[3], output[-5000:]
    assert float(told[2]) < 4 * GLOO_TIMEOUT  # far from forever, on a busy machine as well
    assert job.check_checkpoint() == 2
    return f"{fault}: rank 0 waited {told[2]} s"


def test_a_killed_rank_ends_the_job(tmp_path):
    print(check_fault(tmp_path, "kill"))


def test_ctrl_c_twice(tmp_path):
    first = Job(tmp_path)
    first.wait_for("rank 1: step 3")
    first.interrupt()
    first.finish()
    assert first.check_checkpoint() == 2
    second = Job(tmp_path)  # goes on from there
    second.wait_for("rank 1: restored")
    second.interrupt()
    second.finish()
    assert second.check_checkpoint() == 2
