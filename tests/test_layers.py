"""Who may import whom. Imports run downward only, and TensorFlow stays in its rooms."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hvd_fec"
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py")) + sorted(PACKAGE.rglob("*.pyx"))
}
MODULES = {name.removesuffix(".__init__") for name in SOURCES}

MAY_USE_TENSORFLOW = {
    "hvd_fec.cli.steps",
    "hvd_fec.batching",
    "hvd_fec.callbacks",
    "hvd_fec.compression",
    "hvd_fec.exchange",
}
HEAVY = {"tensorflow", "horovod", "keras", "ml_dtypes"}  # ml_dtypes comes with TensorFlow
OPTIONAL = {
    "hvd_fec.sharding": {"matplotlib"},
    "hvd_fec.cli.commands": {"click", "rich"},
    "hvd_fec.cli.advise": {"matplotlib"},
}

# From the top down: a module imports from lower layers only. The package's own __init__ is the
# roof; it is below everything as well, since importing any module runs it, and so imports
# nothing heavy (see the tests at the end).
LAYERS = [
    {"hvd_fec.cli.__main__"},
    {"hvd_fec.cli"},  # imports its commands when it is called
    {"hvd_fec.cli.commands"},
    {
        "hvd_fec.cli.doctor",
        "hvd_fec.cli.bench",
        "hvd_fec.cli.steps",
        "hvd_fec.cli.advise",
        "hvd_fec.cli.contents",
    },
    {"hvd_fec.cli.sets"},
    {"hvd_fec"},
    {"hvd_fec.callbacks"},
    {"hvd_fec.compression"},
    {"hvd_fec.batching"},
    {"hvd_fec.exchange"},
    {"hvd_fec.survey", "hvd_fec.cost"},
    {"hvd_fec.codecs"},
    {"hvd_fec.codecs.fec", "hvd_fec.codecs.ternary"},
    {"hvd_fec.codecs.coded"},
    {"hvd_fec.codecs.arrays", "hvd_fec.codecs.kernels"},
    {"hvd_fec.codecs._numpy", "hvd_fec._ext._kernels"},
    {
        "hvd_fec._ext",
        "hvd_fec._version",
        "hvd_fec.callsite",
        "hvd_fec.checkpoint",
        "hvd_fec.control",
        "hvd_fec.feedback",
        "hvd_fec.sharding",
        "hvd_fec.stats",
        "hvd_fec.threads",
        "hvd_fec.wire",
    },
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(name, path):
    """Absolute names of what a module imports, at any depth of its code."""
    if path.suffix == ".pyx":  # not Python, but its import lines are
        lines = path.read_text().replace(" cimport ", " import ").splitlines()
        lines = [line for line in lines if line.startswith(("import ", "from ", "cimport "))]
        text = "\n".join(lines).replace("cimport ", "import ")
    else:
        text = path.read_text()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base
        elif isinstance(node, ast.Call) and getattr(
            node.func, "id", getattr(node.func, "attr", "")
        ) in ("__import__", "import_module"):
            pytest.fail(f"{name} hides an import from this test in line {node.lineno}")


IMPORTS = {
    name.removesuffix(".__init__"): set(imports(name.removesuffix(".__init__"), path))
    for name, path in SOURCES.items()
}


def test_the_parser_sees_what_is_there():
    assert {"tensorflow", "horovod.tensorflow", "hvd_fec.wire"} <= IMPORTS["hvd_fec.exchange"]
    assert "hvd_fec.compression" in IMPORTS["hvd_fec"], "an import inside a function"
    assert "hvd_fec._ext._kernels" in IMPORTS["hvd_fec.codecs.kernels"]
    assert "libc.stdint" in IMPORTS["hvd_fec._ext._kernels"]


def test_every_module_has_its_layer():
    assert set(LEVEL) >= set(IMPORTS), "put new modules into LAYERS"


@pytest.mark.parametrize("name", IMPORTS)
def test_tensorflow_stays_in_its_rooms(name):
    used = {imported.split(".")[0] for imported in IMPORTS[name]}
    assert not used & HEAVY or name in MAY_USE_TENSORFLOW
    unknown = used - HEAVY - set(sys.stdlib_module_names) - {"hvd_fec", "libc", "numpy"}
    assert unknown == OPTIONAL.get(name, set()), "a new dependency"


@pytest.mark.parametrize("name", IMPORTS)
def test_imports_run_downward(name):
    for imported in IMPORTS[name]:
        if imported.split(".")[0] == "hvd_fec":
            assert imported in LEVEL, f"{imported} is not a module"
            assert LEVEL[imported] > LEVEL[name]


def test_kernels_import_nothing_of_ours():
    for name in IMPORTS:
        if name.startswith("hvd_fec._ext"):
            assert {imported.split(".")[0] for imported in IMPORTS[name]} <= {"libc"}


# ---- without TensorFlow and Horovod -------------------------------------------------------------

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "horovod", "keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


def run(code):
    no_extension = "ignore:hvd_fec runs on its NumPy kernels"
    command = [sys.executable, "-W", "error", "-W", no_extension, "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def check(code):
    result = run(code)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_without_tensorflow():
    check(BLOCK + "import hvd_fec; assert hvd_fec.__version__; hvd_fec.PayloadError")


def test_codecs_and_sharding_without_tensorflow():
    check(
        BLOCK
        + """
import numpy as np
import hvd_fec
import hvd_fec.sharding
FecCodec = hvd_fec.codecs.FecCodec
x = np.float32([1, -2, 0.001])
out = np.zeros(3, np.float32)
FecCodec(0).decode_add(FecCodec(0).encode(x), out)
assert (out == np.float32(4 / 3) * np.float32([1, -2, 0])).all()
"""
    )


@pytest.mark.parametrize(
    "use",
    [
        "hvd_fec.FEC(threshold=-9)",
        "hvd_fec.Ternary()",
        "hvd_fec.TwoBit()",
        "hvd_fec.Compression.fec",
        "hvd_fec.callbacks",
    ],
)
def test_compressors_without_tensorflow(use):
    result = run(f"{BLOCK}\nimport hvd_fec\n{use}")
    assert result.returncode == 1
    name = use.split("(")[0].removesuffix(".fec")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {name} needs TensorFlow and Horovod"), last
    assert "No module named 'horovod'" in last or "No module named 'tensorflow'" in last, last


def test_unknown_names():
    result = run(f"{BLOCK}\nimport hvd_fec\nhvd_fec.FCE")
    assert "AttributeError: module 'hvd_fec' has no attribute 'FCE'" in result.stderr


def test_importing_the_package_does_not_import_tensorflow():
    """Even where it is there: it takes seconds."""
    check(
        "import sys, hvd_fec, hvd_fec.codecs, hvd_fec.sharding; "
        "assert not {'tensorflow', 'horovod', 'keras'} & set(sys.modules)"
    )
