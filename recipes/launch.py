"""Runs recipes under horovodrun, for the scripts that compare them."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class RunError(Exception):
    """A recipe ended without its result line; the text is the last of what it said."""


def run(recipe, ranks, options):
    """The result line of ``recipes/RECIPE.py OPTIONS`` on local ranks, as a dict.

    Raises RunError.
    """
    command = ["horovodrun", "-np", str(ranks), sys.executable, str(HERE / f"{recipe}.py")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [*command, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path},
    )
    lines = [line for line in done.stdout.splitlines() if '{"recipe"' in line]
    if done.returncode or not lines:
        said = [line for line in done.stdout.splitlines() if line.startswith("[")]  # by a rank
        raise RunError("\n".join(said[-20:]) or done.stdout[-2000:])
    return json.loads(lines[-1][lines[-1].index("{") :])


def split_options(arguments):
    """What stands before ``--``, and what stands behind it."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]
