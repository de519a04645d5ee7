"""The source distribution and the wheel, as those get them who install them elsewhere.

``tests/soak/test_installed.py`` runs the whole suite there.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest

pytest.importorskip("Cython", reason="building needs Cython")
ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


class Installed:
    """The sdist, unpacked; the wheel made of it, installed into an environment of its own that
    has the packages of this one. All are built in ``folder``."""

    def __init__(self, folder):
        # Elsewhere than in the tree, whose SOURCES.txt would add what an older sdist had.
        base = ("-q", "egg_info", "-e", folder)
        run(sys.executable, "setup.py", *base, "sdist", "-d", folder, cwd=ROOT)
        (self.sdist,) = folder.glob("*.tar.gz")
        with tarfile.open(self.sdist) as archive:
            archive.extractall(folder)
        self.source = folder / self.sdist.name.removesuffix(".tar.gz")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        offline = ("-q", "--no-index", "--no-deps")
        run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, self.source)
        (self.wheel,) = folder.glob("*.whl")

        run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
        self.python = folder / "env" / "bin" / "python"
        self.packages = next((folder / "env" / "lib").glob("*/site-packages"))
        self.cwd = folder / "empty"
        self.cwd.mkdir()
        no_compiler = {**self.environment(), "PATH": str(self.cwd), "CC": "false", "CXX": "false"}
        run(*pip, "--python", self.python, "install", *offline, self.wheel, env=no_compiler)
        (self.packages / "rest.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")

    @staticmethod
    def environment(**changes):
        hidden = ("PYTHONPATH", "HVD_FEC_ISA")
        return {**{k: v for k, v in os.environ.items() if k not in hidden}, **changes}

    def __call__(self, *arguments, **environment):
        """What this environment's Python prints, in a folder that holds nothing."""
        env = self.environment(**environment)
        return run(self.python, *arguments, cwd=self.cwd, env=env)

    def pytest(self, *arguments, **environment):
        config = ("-c", self.source / "pyproject.toml", "--rootdir", self.source)
        return self("-m", "pytest", "-q", "-p", "no:cacheprovider", *config, *arguments,
                    **environment)  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"))


def test_sdist_has_what_the_repository_has(installed):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    with tarfile.open(installed.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {name for name in listed.stdout.split() if (ROOT / name).exists()}
    assert files - packed <= {".gitignore", ".ci/run"}


def test_wheel_has_the_package_and_no_sources(installed):
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "py.typed")
        for path in (ROOT / "hvd_fec").rglob(pattern)
    }
    (kernels,) = packed - package
    assert package <= packed
    assert kernels.startswith("hvd_fec/_ext/_kernels.") and kernels.endswith(".so")


def test_wheel_works_where_there_is_no_compiler(installed):
    where, isa = installed(
        "-c",
        "import hvd_fec; from hvd_fec.codecs import kernels; "
        "print(hvd_fec.__file__, kernels.active.isa())",
    ).split()
    assert Path(where).is_relative_to(installed.packages) and isa
    tests = installed.source / "tests"
    assert " passed" in installed.pytest(tests / "test_wire.py")


def test_the_codec_works_without_the_extension(installed):
    tests = installed.source / "tests"
    (extension,) = (installed.packages / "hvd_fec" / "_ext").glob("*.so")
    hidden = extension.rename(extension.with_suffix(".hidden"))
    try:
        output = installed.pytest(tests / "test_fec.py")
    finally:
        hidden.rename(extension)
    assert " passed" in output
