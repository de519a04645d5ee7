#!/usr/bin/env python3
"""Say what this machine lacks, one line each, before a build fails over it.

Usage: preflight.py STAGE, where STAGE is what is about to be made:
    venv        .venv and all that goes into it
    horovod     Horovod, with the cmake that was installed into .venv
    extension   hvd_fec's own extension

Exits with 1 if anything is missing. Uses the standard library only and runs on
Python 3.6 and later, since a wrong Python is one of the things it reports.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Measured: .venv takes 1.7 GB; temporary files peak at 0.3 GB, both while wheels
# are downloaded and while Horovod is built. The rest is margin, and room for
# pip's cache of downloads.
VENV_GB = 3.0
TEMP_GB = 1.0


def check_platform():
    libc = platform.libc_ver()[0]
    here = "%s %s" % (platform.system(), platform.machine())
    if here != "Linux x86_64" or sys.maxsize < 2**32 or libc != "glibc":
        bits = 64 if sys.maxsize > 2**32 else 32
        yield (
            "64-bit x86 Linux with glibc",
            "this is a %d-bit Python on %s with %s" % (bits, here, libc or "another C library"),
            "tensorflow-cpu 2.15.1 has no wheel for it",
        )


def check_python():
    version = platform.python_version()
    if not (3, 9) <= sys.version_info[:2] <= (3, 11):
        yield (
            "Python 3.11",
            "%s is %s, and TensorFlow 2.15 has wheels for 3.9 to 3.11 only"
            % (sys.executable, version),
            "install it and run make PYTHON=python3.11",
        )
    elif sys.version_info[:2] != (3, 11):
        print("hvd_fec: note: Python %s may do, but only 3.11 is tested" % version)


def check_venv():
    try:
        import ensurepip  # noqa: F401  (Debian splits it off; venv then fails half way)
        import venv  # noqa: F401
    except ImportError as error:
        yield ("Python's venv", str(error), "on Debian: apt-get install python3-venv")


def check_headers():
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        yield ("Python headers", header + " not found", "on Debian: apt-get install python3-dev")


def check_c():
    # What setuptools will call.
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc"
    return compiler("C compiler", command, ["-x", "c"], "#include <math.h>", "gcc libc6-dev")


def check_cxx():
    # What CMake will call: $CXX, or the first of these that it finds.
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    command = os.environ.get("CXX") or (found or ["g++"])[0]
    flags = ["-x", "c++", "-std=c++17"]  # as TensorFlow's headers need
    return compiler("C++ compiler", command, flags, "#include <optional>", "g++")


def compiler(what, command, flags, include, package):
    """Check that `command` turns a small program into an executable."""
    command = shlex.split(command)
    cure = "on Debian: apt-get install " + package
    if not shutil.which(command[0]):
        yield (what, command[0] + " not found", cure)
        return
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command + flags + ["-", "-o", os.path.join(folder, "program")],
            input=(include + "\nint main() { return 0; }\n").encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        said = done.stdout.decode(errors="replace")
        errors = [line.strip() for line in said.splitlines() if "error" in line]
        errors.append("exit status %d" % done.returncode)
        yield (what, "%s fails on a small program (%s)" % (command[0], errors[0]), cure)


def check_make():
    if not (shutil.which("make") or shutil.which("gmake")):
        yield ("make", "not found", "on Debian: apt-get install make")


def check_cmake():
    cure = "run make distclean and try again, or on Debian: apt-get install cmake"
    cmake = shutil.which("cmake")
    if not cmake:
        yield ("cmake", "found neither in .venv nor on PATH", cure)
        return
    done = subprocess.run([cmake, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.stdout.decode(errors="replace").strip()
    version = re.search(r"version (\d+)\.(\d+)", said)
    # Below 3.13 Horovod would go and fetch a CMake of its own.
    if not version or (int(version.group(1)), int(version.group(2))) < (3, 13):
        reason = "%s --version says: %s" % (cmake, said.splitlines()[-1] if said else "nothing")
        yield ("cmake 3.13 or later", reason, cure)


def check_disk():
    need, where = {}, {}
    for folder, gigabytes in ((ROOT, VENV_GB), (tempfile.gettempdir(), TEMP_GB)):
        device = os.stat(folder).st_dev
        need[device] = need.get(device, 0) + gigabytes
        where.setdefault(device, folder)
    for device, folder in where.items():
        free = shutil.disk_usage(folder).free
        if device == os.stat(ROOT).st_dev:
            free += size(os.path.join(ROOT, ".venv"))  # what is there gets replaced
        if free < need[device] * 1e9:
            yield (
                "disk space",
                "%.1f GB free in %s, %.1f GB needed" % (free / 1e9, folder, need[device]),
                "make room there" if folder == ROOT else "make room there or set TMPDIR",
            )


def size(folder):
    return sum(
        os.lstat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


STAGES = {
    "venv": [
        check_platform,
        check_python,
        check_venv,
        check_headers,
        check_disk,
        check_c,
        check_cxx,
        check_make,
    ],
    "horovod": [check_c, check_cxx, check_make, check_cmake],
    "extension": [check_headers, check_c],
}


def main(arguments):
    if len(arguments) != 1 or arguments[0] not in STAGES:
        sys.stderr.write(__doc__)
        return 2
    failed = False
    for check in STAGES[arguments[0]]:
        try:
            missing = list(check() or ())
        except OSError as error:  # such as a full or read-only temporary folder
            missing = [("a working system", "%s (in %s)" % (error, check.__name__), "see there")]
        for what, reason, cure in missing:
            sys.stderr.write("hvd_fec: missing %s: %s; %s\n" % (what, reason, cure))
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
