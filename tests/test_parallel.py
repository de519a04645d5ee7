"""Runs the files of tests/parallel under horovodrun: one launch each and number of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod.tensorflow")

HERE = Path(__file__).parent
RUN = Path(sys.executable).with_name("horovodrun")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", "HOROVOD_CYCLE_TIME": "0.5"}


def horovodrun(ranks, *command, timeout=240, **env):
    """The output of a command that must succeed on all ranks."""
    done = subprocess.run(
        [RUN, "-np", str(ranks), sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=HERE.parent,
        env={**os.environ, **QUIET, **env},
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.parametrize("name, ranks", [("fec", 2), ("fec", 3), ("callbacks", 3), ("training", 2)])
def test_exchange(name, ranks):
    output = horovodrun(
        ranks, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/parallel/{name}.py"
    )
    assert output.count(" passed") == ranks, output[-8000:]
