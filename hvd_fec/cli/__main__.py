"""``python -m hvd_fec.cli``, where the console script is not on PATH."""

from hvd_fec.cli import main

main()
