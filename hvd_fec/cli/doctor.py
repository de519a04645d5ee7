"""What an environment has and lacks.

TensorFlow and Horovod are tried in a process of their own: they may be absent, or crash, and they
write to the terminal.
"""

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from typing import Any, Dict, Iterator, NamedTuple

from hvd_fec import threads
from hvd_fec._version import __version__

TENSORFLOW, HOROVOD = "2.15", "0.28.1"
_TIMEOUT = 180  # seconds; importing TensorFlow from a cold network disk takes its time

_REBUILD = (
    "reinstall it against this TensorFlow: HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps "
    f"horovod=={HOROVOD} (needs cmake below 4 and a C++ compiler; make does all this in hvd_fec's "
    "source tree)"
)
_BUILD = (
    "install hvd_fec again where there is a C compiler: pip install --force-reinstall --no-deps . "
    "in its source tree"
)


class Finding(NamedTuple):
    """One thing that was looked at. ``mend`` is empty where nothing is wrong."""

    subject: str
    found: str
    mend: str = ""


def examine() -> Iterator[Finding]:
    """All findings, one by one, since some take seconds."""
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("NumPy", _version("numpy"))
    yield Finding("hvd_fec", __version__)
    yield _extension()
    yield _threads()
    said = _try_all()
    tensorflow = _tensorflow(said["tensorflow"])
    horovod = _horovod(said["horovod"], said["horovod.tensorflow"], tensorflow)
    yield from (tensorflow, horovod)
    if not (tensorflow.mend or horovod.mend):
        yield _compressors(said["hvd_fec"])


def _extension() -> Finding:
    subject = "kernels"
    wanted = os.environ.get("HVD_FEC_ISA")
    if wanted == "numpy":
        return Finding(subject, "NumPy", "HVD_FEC_ISA=numpy asks for them, unset it: they are slow")
    try:
        from hvd_fec._ext import _kernels  # type: ignore[attr-defined]
    except ImportError as error:
        return Finding(
            subject,
            f"the compiled extension cannot be loaded, NumPy is many times slower ({error})",
            _BUILD,
        )
    try:
        from hvd_fec.codecs.kernels import active
    except ImportError as error:
        return Finding(subject, str(error), _BUILD)
    except ValueError as error:
        return Finding(subject, str(error), "unset HVD_FEC_ISA: the best is chosen")
    others = ", ".join(isa for isa in _kernels.available() if isa != active.isa())
    asked = ", as HVD_FEC_ISA asks" * bool(wanted)
    return Finding(subject, f"compiled, {active.isa()}{asked} (also here: {others})")


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0))
    try:
        count = threads.num_threads()
    except ValueError as error:
        return Finding("threads", str(error), "unset HVD_FEC_NUM_THREADS or set it to 1 or more")
    given = " as HVD_FEC_NUM_THREADS asks" * ("HVD_FEC_NUM_THREADS" in os.environ)
    return Finding("threads", f"{count} for one rank{given}, {cores} cores")


class _Said(NamedTuple):
    value: Any
    error: str


def _tensorflow(said: _Said) -> Finding:
    subject, pin = "TensorFlow", f"pip install 'tensorflow=={TENSORFLOW}.*'"
    if said.error:
        missing = said.error == "No module named 'tensorflow'"
        return Finding(subject, _MISSING if missing else f"cannot be imported: {said.error}", pin)
    if not said.value.startswith(TENSORFLOW + "."):
        return Finding(subject, said.value, f"hvd_fec is for {TENSORFLOW}: {pin}")
    return Finding(subject, said.value)


def _horovod(base: _Said, built: _Said, tensorflow: Finding) -> Finding:
    subject = "Horovod"
    if base.error:
        missing = base.error == "No module named 'horovod'"
        found = _MISSING if missing else f"cannot be imported: {base.error}"
        return Finding(subject, found, _REBUILD.replace("reinstall it", "install it"))
    if "has not been built" in built.error:
        return Finding(subject, f"{base.value}, built without TensorFlow", _REBUILD)
    if tensorflow.mend and built.error:
        return Finding(subject, f"{base.value}; what it does with TensorFlow cannot be tried")
    if built.error:
        found = f"{base.value}, but horovod.tensorflow cannot be imported: {built.error}"
        found += " (it was built for another TensorFlow)" * ("undefined symbol" in built.error)
        return Finding(subject, found, _REBUILD)
    if not {"gloo", "mpi"} & set(built.value):
        return Finding(subject, f"{base.value}, built without Gloo and MPI", _REBUILD)
    found = f"{base.value}, built with TensorFlow, {', '.join(built.value)}"
    if base.value != HOROVOD:
        return Finding(subject, found, f"hvd_fec is for {HOROVOD}: {_REBUILD}")
    return Finding(subject, found)


def _compressors(said: _Said) -> Finding:
    if said.error:
        return Finding(
            "compressors",
            said.error,
            "mend other faults first; else see the error",
        )
    return Finding("compressors", f"{said.value} is ready")


_MISSING = "not installed"
_TRIALS = {
    "horovod": "import horovod; value = horovod.__version__",
    "tensorflow": "import tensorflow; value = tensorflow.__version__",
    "horovod.tensorflow": "import horovod.tensorflow as hvd\n"
    "value = [n for n in ('gloo', 'mpi', 'nccl') if getattr(hvd, n + '_built')()]",
    "hvd_fec": "import hvd_fec; value = repr(hvd_fec.FEC())",
}
_PROGRAM = """
import json, sys
sys.path[:], trials = json.loads(sys.argv[1])
for name, code in trials.items():
    names, error = {}, ""
    try:
        exec(code, names)
    except BaseException as caught:
        error = (str(caught).strip() or type(caught).__name__).splitlines()[0]
    print("\\n>>>" + json.dumps([name, names.get("value"), error]), flush=True)
"""


def _try_all() -> Dict[str, _Said]:
    """What each trial has as its ``value``, with this process's modules in another process."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps([sys.path, _TRIALS])]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, timeout=_TIMEOUT
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, status = error.stdout or b"", None
    if status is None:
        end = f"no answer within {_TIMEOUT} s"
    elif status < 0:
        end = f"crashed with {signal.Signals(-status).name}"
    else:
        end = f"ended the process with exit status {status}"
    said, lines = {}, output.decode(errors="replace").splitlines()
    for line in lines:
        if line.startswith(">>>"):
            name, *rest = json.loads(line[3:])
            said[name] = _Said(*rest)
    for name in _TRIALS:
        if name not in said:
            said[name], end = _Said(None, end), "not tried after that"
    return said


def _version(package: str) -> str:
    return importlib.metadata.version(package)
