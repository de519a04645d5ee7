"""The commands of ``hvd-fec`` and their options; the work is done by the other modules here."""

import math
import re
import sys
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, track
from rich.table import Table

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


def _need_kernels():
    """Ends the command if they cannot be used; doctor, which says why, does without this."""
    try:
        import hvd_fec.codecs  # noqa: F401
    except (ImportError, ValueError) as error:
        raise click.ClickException(f"{error} (see hvd-fec doctor)") from error


class Bandwidth(click.ParamType):
    """Bytes per second, from a text such as ``1gbit``."""

    name = "rate"
    _UNITS = {"": 1e6, "mbit": 1e6, "gbit": 1e9}

    def convert(self, value, param, ctx):
        if isinstance(value, float):
            return value
        if value == "unlimited":
            return math.inf
        match = re.fullmatch(r"(\d+\.?\d*) ?([mg]bit|)(?:/s)?", value.lower())
        if not match or not float(match[1]):
            self.fail(f"{value!r} is none of 100mbit, 2.5gbit, 100 (Mbit/s) or unlimited")
        return float(match[1]) * self._UNITS[match[2]] / 8


@hvd_fec.command()
@click.argument(
    "files", metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False), nargs=-1
)
@click.option("--set", "name", help="gradients of these shapes instead of FILEs")
@click.option(
    "--bandwidth", type=Bandwidth(), default="1gbit", show_default=True,
    help="of each worker's link: 100mbit, 2.5gbit, a number of Mbit/s, or unlimited",
)  # fmt: skip
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="how many")
@click.option(
    "--threshold", type=click.FloatRange(-126, 113), default=-9, show_default=True,
    help="of FEC, as its argument",
)  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False), help="draw step time over bandwidth there")
def advise(files, name, bandwidth, workers, threshold, plot):
    """Predict the exchange of every compressor, and recommend one.

    FILE is an .npz of one step's gradients, one array per tensor, as the recipes save them with
    --save-gradients. Give some steps, a FILE each: gradients differ much from batch to batch.
    """
    _need_kernels()
    from hvd_fec.cli import advise as _advise
    from hvd_fec.cli import sets

    if bool(files) == bool(name):
        raise click.UsageError(f"give FILEs, or --set {', '.join(sets.SETS)}")
    if name and name not in sets.SETS:
        raise click.BadParameter(f"{name!r} is none of {', '.join(sets.SETS)}", param_hint="--set")
    threshold = int(threshold) if threshold == int(threshold) else threshold
    try:
        steps = [_advise.standard(name)] if name else [_advise.read(file) for file in files]
        fec = _advise.lasting(steps, threshold)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    sizes = [gradient.size for gradient in steps[0].values()]
    network = _advise.Network(bandwidth)
    ranked = _advise.rank(sizes, workers, network, fec.ratio, threshold)

    source = name or Path(files[0]).name + f" and {len(files) - 1} more" * (len(files) > 1)
    click.echo(f"{source}: {len(sizes)} tensors, {sum(sizes) / 1e6:.2f} million values")
    click.echo(
        f"FEC(threshold={threshold}) sends {fec.density:.2%} of them in the long run, "
        f"{fec.ratio:.1f} times fewer bytes"
    )
    rate = "no limit" if bandwidth == math.inf else f"{bandwidth / 125e3:,.6g} Mbit/s"
    table = Table(box=box.SIMPLE, title=f"{workers} workers, {rate}: one exchange, predicted")
    table.add_column("compression", no_wrap=True)
    for column in ("ms", "host", "waits", "transfer", "MB received", "none / this"):
        table.add_column(column, justify="right")
    [none] = [step.seconds for name, _, step in ranked if name == "none"]
    for name, _, step in ranked:
        times = (step.seconds, step.host, step.latency, step.transfer)
        cells = [*(f"{1e3 * t:.1f}" for t in times), f"{step.bytes / 1e6:.3f}"]
        table.add_row(name, *cells, f"{none / step.seconds:.2f}")
    Console().print(table)
    click.echo(f"Recommended: compression={_advise.recommended(ranked).code}")
    if plot:
        try:
            title = f"{source}, {workers} workers"
            _advise.plot(plot, sizes, workers, bandwidth, fec.ratio, threshold, title)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"--plot needs {error.name}, which is not installed: pip install 'hvd_fec[plot]'"
            ) from error
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot draw into {plot}: {error}") from error


@hvd_fec.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def inspect(file):
    """Say what a payload, a frame or a compressor's saved state holds.

    FILE is read to its end and proven sound; what is damaged or foreign is an error.
    """
    _need_kernels()
    from hvd_fec.cli import contents

    try:
        found = contents.read(file)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if isinstance(found, contents.State):
        click.echo(f"State of {found.compressor}, rank {found.rank} of {found.ranks}")
        for name, value in found.rest.items():
            click.echo(f"{name}: {value}")
        table = Table("residual", box=box.SIMPLE)
        for column in ("values", "norm", "largest"):
            table.add_column(column, justify="right")
        for key, size, norm, largest in found.residuals:
            table.add_row(escape(key), f"{size:,}", f"{norm:.4g}", f"{largest:.4g}")
        Console().print(table)
        return
    for i, payloads in enumerate(found.parts):
        if found.framed:
            click.echo(f"Frame {i}, {len(payloads)} payloads")
        table = Table("form", "dtype", box=box.SIMPLE, padding=(0, 0, 0, 1))  # 80 columns
        for column in ("from", "values", "kept", "bytes", "ratio", "largest", "NaN"):
            table.add_column(column, justify="right")
        for p in payloads:
            table.add_row(
                *(p.form, p.dtype, f"2^{p.threshold:g}", f"{p.count:,}"),
                *(f"{p.kept / max(p.count, 1):.3%}", f"{p.nbytes:,}"),
                *(f"{4 * p.count / p.nbytes:.1f}", f"{p.largest:.3g}", f"{p.nonfinite:,}"),
            )
        Console().print(table)


@hvd_fec.command()
@click.option(
    "--size", type=click.IntRange(1000), default=4_000_000, show_default=True,
    help="float32 elements of the codecs' gradients",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="how often")
@click.option("--step", is_flag=True, help="also exchange gradients between two processes here")
@click.option("--set", "name", default="20x100k", show_default=True, help="what they exchange")
def bench(size, rounds, step, name):
    """Measure codecs and exchanges on this machine.

    Codecs are timed against an in-place add of the same arrays, which moves what an encoder with
    error feedback has to move: median, smallest and largest ratio.
    """
    _need_kernels()
    from hvd_fec import threads
    from hvd_fec.cli import bench as _bench
    from hvd_fec.cli import sets
    from hvd_fec.codecs.kernels import active

    if name not in sets.SETS:
        raise click.BadParameter(f"{name!r} is none of {', '.join(sets.SETS)}", param_hint="--set")
    cases = [("fec", form, density) for density in (0.05, 0.01) for form in ("planes", "coded")]
    count = threads.num_threads()
    title = f"{size:,} float32, kernels {active.isa()}, {count} thread{'s' * (count > 1)}"
    table = Table("codec", title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
    for column in ("kept", "encode / add", "decode_add / add", "ratio", "/ entropy"):
        table.add_column(column, justify="right")
    console = Console()
    for codec, form, density in track([*cases, ("ternary", "", 0)], "codecs", transient=True):
        if codec == "ternary":
            row = _bench.ternary(size, rounds)
        else:
            row = _bench.fec(size, density, form, rounds)
        times = ["{:.2f} ({:.2f}-{:.2f})".format(*row[key]) for key in ("encode", "decode_add")]
        entropy = f"{row['entropy']:.2f}" if "entropy" in row else ""
        kept = f"{density:.0%}" if density else ""
        table.add_row(f"{codec} {form}", kept, *times, f"{row['ratio']:.1f}", entropy)
    console.print(table)
    click.echo(f"  the add took {row['add_ms']:.2f} ms")
    if not step:
        return
    with Progress(transient=True) as bar:
        task = bar.add_task("exchanges", total=None)
        try:
            for said in _bench.steps(name, 2 * rounds):
                if isinstance(said, tuple):
                    bar.update(task, completed=said[0], total=said[1])
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    table = Table("compression", title=f"{name}, 2 processes here, one exchange", box=box.SIMPLE)
    for column in ("ms", "from - to", "MB sent", "values sent", "none / this"):
        table.add_column(column, justify="right")
    for row in said:
        table.add_row(
            *(row["compressor"], f"{row['milliseconds']:.1f}"),
            "{:.1f} - {:.1f}".format(*row["spread"]),
            *(f"{row['bytes'] / 1e6:.3f}", f"{row['density']:.2%}"),
            f"{row['faster_than']['none']:.2f}",
        )
    console.print(table)
