"""The commands of ``hvd-fec`` and their options; the work is done by the other modules here."""

import sys

import click

from hvd_fec._version import __version__
from hvd_fec.cli import doctor as _doctor


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def hvd_fec():
    """Gradient compression for Horovod."""


@hvd_fec.command()
def doctor():
    """Check this environment; name what is wrong and how to mend it.

    Exits with 1 if compressors cannot work here, or only many times slower.
    """
    faults = []
    for finding in _doctor.examine():
        mark, colour = ("FAULT", "red") if finding.mend else ("ok", "green")
        click.secho(f"{mark:6}", fg=colour, bold=True, nl=False)
        click.echo(f"{finding.subject}: {finding.found}")
        if finding.mend:
            faults.append(finding)
            click.echo(f"      mend: {finding.mend}")
    click.echo()
    if faults:
        click.echo(f"{len(faults)} fault{'s' * (len(faults) > 1)} found.")
        sys.exit(1)
    click.echo(
        "Nothing is wrong. Launch with horovodrun -np 2 or more: one process has no exchange."
    )
