"""The whole suite where the wheel is installed, with each set of kernels."""

import os
import sys
from pathlib import Path

import pytest
from test_packaging import Installed

try:
    from hvd_fec._ext import _kernels
except ImportError:
    pytest.skip("the compiled extension is not there", allow_module_level=True)

DATA = {"HVD_FEC_DATA_DIR": os.environ.get("HVD_FEC_DATA_DIR", "")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    installed = Installed(tmp_path_factory.mktemp("installed"))
    # The tests under horovodrun start in the source folder, where the package without its
    # extension would come before the installed one.
    (installed.source / "aside").mkdir()
    run = Path(sys.executable).with_name("horovodrun")
    installed.python.with_name("horovodrun").symlink_to(run)
    return installed


def suite(installed, **environment):
    """The closing lines of pytest of all tests."""
    tests = installed.source / "tests"
    runs = [path for path in tests.glob("test_*.py") if "horovodrun" in path.read_text()]
    other = [path for path in tests.glob("test_*.py") if path not in runs]
    package, aside = installed.source / "hvd_fec", installed.source / "aside" / "hvd_fec"
    alone = installed.pytest(*other, **DATA, **environment)
    package.rename(aside)
    try:
        parallel = installed.pytest(*runs, **DATA, **environment)
    finally:
        aside.rename(package)
    return alone.splitlines()[-1], parallel.splitlines()[-1]


@pytest.mark.parametrize("isa", [*_kernels.available(), "numpy"])
def test_suite_with(installed, isa):
    print(isa, *suite(installed, HVD_FEC_ISA=isa), sep="\n")


def test_suite_without_the_extension(installed):
    for extension in (installed.packages / "hvd_fec" / "_ext").glob("*.so"):
        extension.unlink()
    print("no extension", *suite(installed), sep="\n")
