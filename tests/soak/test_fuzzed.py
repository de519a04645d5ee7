"""Coverage-guided fuzzing: of the decoders with Atheris, of the kernels with clang's libFuzzer."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "hvd_fec" / "_ext"
CPU_SECONDS = int(os.environ.get("HVD_FEC_FUZZ_SECONDS", 600))
OPTIONS = ["-max_len=4096", "-use_value_profile=1", "-rss_limit_mb=4096"]


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def fuzz(folder, command, **environment):
    """Runs with one corpus until enough CPU time is used; whatever is found ends it."""
    begun, runs, seed = cpu_seconds(), 0, 0
    while (used := cpu_seconds() - begun) < CPU_SECONDS:
        seed += 1
        options = [*OPTIONS, f"-max_total_time={min(120, CPU_SECONDS)}", f"-seed={seed}"]
        done = subprocess.run(
            [*map(str, command), folder / "corpus", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=folder,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, done.stdout[-8000:]
        last = [line for line in done.stdout.splitlines() if " cov: " in line][-1]
        runs += int(last[1:].split()[0])
    print(f"{runs} inputs, {used:.0f} CPU seconds, {last}")


def test_decoders(tmp_path):
    pytest.importorskip("atheris", reason="pip install -r requirements/soak.txt")
    fuzz(tmp_path, [sys.executable, HERE / "fuzz_decoders.py"], HVD_FEC_NUM_THREADS="1")


def test_kernels(tmp_path):
    clang = shutil.which("clang") or shutil.which("clang-14")
    if not clang:
        pytest.skip("libFuzzer comes with clang: apt-get install clang")
    subprocess.run(
        [clang, "-g", "-O1", "-std=gnu11", "-ffp-contract=off", "-fno-sanitize-recover=all"]
        + ["-fsanitize=fuzzer,address,undefined", f"-I{KERNELS}", HERE / "fuzz_kernels.c"]
        + [KERNELS / "kernels.c", "-lm", "-o", tmp_path / "fuzz"],
        check=True,
    )
    (tmp_path / "corpus").mkdir()
    fuzz(tmp_path, [tmp_path / "fuzz"])
