"""The command line, ``hvd-fec``. It needs click: ``pip install hvd_fec[cli]``."""

import sys


def main():
    """What the console script calls."""
    try:
        from hvd_fec.cli.commands import hvd_fec
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("hvd-fec needs click, which is not installed: pip install 'hvd_fec[cli]'")
    hvd_fec(prog_name="hvd-fec")
