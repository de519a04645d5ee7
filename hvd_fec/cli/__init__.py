"""The command line, ``hvd-fec``. It needs click and rich: ``pip install hvd_fec[cli]``."""

import sys


def main():
    """What the console script calls."""
    try:
        from hvd_fec.cli.commands import hvd_fec
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"hvd-fec needs {error.name}, which is not installed: pip install 'hvd_fec[cli]'")
    hvd_fec(prog_name="hvd-fec")
