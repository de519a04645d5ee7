"""The command line, as its users call it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_fec

pytest.importorskip("click")
INSTALLED = Path(hvd_fec.__file__).parents[1]


def call(*arguments, path=(), code=0, **env):
    """What ``hvd-fec`` prints, given folders that come first on PYTHONPATH."""
    paths = [*map(str, path), str(INSTALLED), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "hvd_fec.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "HVD_FEC_ISA": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **env,
        },
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def without(folder, *modules):
    """A folder for PYTHONPATH that makes imports of ``modules`` fail."""
    (folder / "sitecustomize.py").write_text(f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        for module in {modules!r}:
            if (name + ".").startswith(module + "."):
                raise ModuleNotFoundError(f"No module named {{module!r}}", name=module)

sys.meta_path.insert(0, Block())
""")
    return folder


def finding(output, subject):
    """The line about ``subject``, and the line after it."""
    lines = output.splitlines()
    i = next(i for i, line in enumerate(lines) if f" {subject}: " in line)
    return lines[i], lines[i + 1]


# ---- doctor -------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong():
    pytest.importorskip("hvd_fec._ext._kernels")
    pytest.importorskip("horovod.tensorflow")
    output = call("doctor", HVD_FEC_NUM_THREADS="3")
    assert "FAULT" not in output and "Nothing is wrong" in output
    assert "3 for one rank as HVD_FEC_NUM_THREADS asks" in finding(output, "threads")[0]
    assert "gloo" in finding(output, "Horovod")[0]
    assert "FEC(threshold=-9" in finding(output, "compressors")[0]


def test_doctor_without_tensorflow_and_horovod(tmp_path):
    pytest.importorskip("hvd_fec._ext._kernels")
    output = call("doctor", path=[without(tmp_path, "tensorflow", "horovod")], code=1)
    for name in ("TensorFlow", "Horovod"):
        line, mend = finding(output, name)
        assert line.startswith("FAULT") and "not installed" in line and "pip install" in mend
    assert "2 faults found" in output


def test_doctor_with_horovod_built_without_tensorflow(tmp_path):
    horovod = pytest.importorskip("horovod")
    installed = Path(horovod.__file__).parent
    shutil.copytree(installed, tmp_path / "horovod", ignore=shutil.ignore_patterns("mpi_lib*.so"))
    line, mend = finding(call("doctor", path=[tmp_path], code=1), "Horovod")
    assert line.startswith("FAULT") and line.endswith("built without TensorFlow")
    assert "HOROVOD_WITH_TENSORFLOW=1" in mend


def test_doctor_without_the_extension(tmp_path):
    hidden = without(tmp_path, "hvd_fec._ext._kernels", "tensorflow", "horovod")
    line, mend = finding(call("doctor", path=[hidden], code=1), "kernels")
    assert line.startswith("FAULT") and "compiled extension cannot be loaded" in line
    assert "C compiler" in mend


STALE = """
import sys, types
sys.modules["hvd_fec._ext._kernels"] = types.ModuleType("hvd_fec._ext._kernels")
"""


def test_an_extension_of_other_sources_is_named(tmp_path):
    without(tmp_path, "tensorflow", "horovod")
    with open(tmp_path / "sitecustomize.py", "a") as file:
        file.write(STALE)
    output = call("doctor", path=[tmp_path], code=1)
    line, mend = finding(output, "kernels")
    assert line.startswith("FAULT") and "built from other sources" in line
    assert "--force-reinstall" in mend
    assert finding(output, "Horovod"), "doctor goes on"


@pytest.mark.parametrize("use", ["hvd_fec.codecs", "hvd_fec.FEC", "hvd_fec.cost"])
def test_an_extension_of_other_sources_is_not_used(use):
    done = subprocess.run(
        [sys.executable, "-c", f"{STALE}\nimport hvd_fec\n{use}"],
        capture_output=True, text=True,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the compiled extension") and "install" in last


@pytest.mark.parametrize("isa", ["avx1024", "AVX2"])
def test_doctor_names_a_wrong_instruction_set(tmp_path, isa):
    hidden = without(tmp_path, "tensorflow", "horovod")
    output = call("doctor", path=[hidden], code=1, HVD_FEC_ISA=isa)
    line, mend = finding(output, "kernels")
    assert line.startswith("FAULT") and f"not {isa!r}" in line and "unset HVD_FEC_ISA" in mend
    assert finding(output, "Horovod"), "doctor goes on"


def test_doctor_tells_a_crash_from_an_absence(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os; os.abort()")
    line, _ = finding(call("doctor", path=[tmp_path, without(tmp_path, "horovod")], code=1),
                      "TensorFlow")  # fmt: skip
    assert line.startswith("FAULT") and "crashed with SIGABRT" in line


def test_doctor_with_wrong_settings(tmp_path):
    hidden = without(tmp_path, "tensorflow", "horovod")
    output = call("doctor", path=[hidden], code=1, HVD_FEC_NUM_THREADS="x", HVD_FEC_ISA="numpy")
    assert finding(output, "threads")[0].startswith("FAULT")
    assert "unset it" in finding(output, "kernels")[1]


def test_missing_click_is_named(tmp_path):
    output = call("doctor", path=[without(tmp_path, "click")], code=1)
    assert output.splitlines()[-1].endswith("pip install 'hvd_fec[cli]'")
