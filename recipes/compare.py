"""Run a recipe with several compressions and draw what each costs and gives.

    python recipes/compare.py cifar --out cifar.png -- --data-dir ~/data --epochs 4 --eval-steps 40
    python recipes/compare.py mnist --runs none "fec --threshold -8" ternary -- --epochs 1

What follows -- goes to the recipe. Every run has the same seeds, data order and
steps. The table is printed as Markdown. The results are kept next to the picture,
in a folder of its name, and not measured again: after a cut-off the rest is run,
and with --redraw nothing.

Time is a model: the measured step on this machine, plus what the network of
--mbits would add to move the bytes that were counted (see wire_factor).
"""

import argparse
import hashlib
import json
import re
import statistics
import sys
from pathlib import Path

import launch
import numpy as np

from hvd_fec.codecs.ternary import gathers
from hvd_fec.cost import two_shot_pays

RUNS = (
    "none",
    "fp16",
    "twobit --twobit-threshold 0.01",
    "ternary",
    "fec --threshold -9",
    "fec --threshold -7",
    "fec --threshold -5",
)
# From light to dark. Neutral for the ones to compare with, one hue per codec.
SHADES = {
    "none": ("#8a8f98",),
    "fp16": ("#3f4650",),
    "twobit": ("#f0b878", "#d9852b", "#7a4510"),
    "ternary": ("#86d3b0", "#2f9e6e", "#14533a"),
    "fec": ("#86a8ee", "#2f6bde", "#14337a"),
}
NAMES = {
    **{"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet"},
    **{"cnn": "A small CNN", "mlp": "An MLP", "resnet20": "ResNet-20", "resnet50": "ResNet-50"},
    **{"vgg16": "VGG-16", "alexnet": "AlexNet"},
}
INK, FAINT, PAPER = "#1c2128", "#d9dde3", "#ffffff"


# --- Measuring --------------------------------------------------------------


def label(run):
    """A run's name in the picture: without the names of options that have a value."""
    return re.sub(r"--[\w-]+ (?!--)", "", run).replace("--", "")


def measure(args, run, seed):
    """The result of one run, from the cache or from horovodrun; None if it fails."""
    options = [*args.recipe_options, "--compression", *run.split()]
    # Other options are another experiment, even under the same name.
    key = json.dumps([args.ranks, args.recipe, *options, seed])
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    cached = args.folder / f"{label(run).replace(' ', '')}-seed{seed}-{digest}.json"
    if cached.exists():
        return json.loads(cached.read_text())
    if args.redraw:
        return None
    print(f"running {label(run)}, seed {seed}", file=sys.stderr, flush=True)
    try:
        result = launch.run(args.recipe, args.ranks, [*options, "--seed", seed])
    except launch.RunError as error:
        print(f"{label(run)} failed and is left out:\n{error}", file=sys.stderr)
        return None
    args.folder.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps(result, indent=1))
    return result


def wire_factor(compression, ranks, dense_bytes, exchange="auto"):
    """Bytes that a rank sends to the network for each byte it gives away.

    A ring allreduce moves 2 (n - 1) / n times its input through each rank, a
    gather of all payloads n - 1 times one. In two shots a rank gives away a
    payload and the n-th part of one, of which it keeps a part and passes the
    other on n - 1 times.
    """
    two_shots = exchange == "twoshot" or exchange == "auto" and two_shot_pays(ranks, dense_bytes)
    if compression == "fec" and two_shots:
        return 2 * (ranks - 1) / (ranks + 1)
    if compression == "fec" or compression in ("ternary", "twobit") and gathers(ranks):
        return ranks - 1
    return 2 * (ranks - 1) / ranks


def wire_seconds(result, mbits):
    """Seconds per step that the bytes take through a network of `mbits` Mbit/s."""
    steps = result["steps"] - result["first_step"]
    sent, dense = (1e6 * result[key] / steps for key in ("mb_sent", "mb_dense"))
    exchange = result["settings"].get("exchange", "auto")
    sent *= wire_factor(result["compression"], result["ranks"], dense, exchange)
    return 8 * sent / (1e6 * mbits)


# --- Drawing ----------------------------------------------------------------


def summarize(run, results, mbits):
    """One row of the table: means over seeds, and the spread of the accuracy."""
    accuracies = [result["test_accuracy"] for result in results]
    # Other work on the machine only ever slows a run down, so the fastest says most.
    step_ms = min(result["step_ms"] for result in results)
    wire_ms = 1e3 * statistics.mean(wire_seconds(result, mbits) for result in results)
    return {
        "name": label(run),
        "accuracies": accuracies,
        "accuracy": statistics.mean(accuracies),
        "spread": max(accuracies) - min(accuracies),
        "mb": statistics.mean(result["mb_sent"] for result in results),
        "ratio": statistics.mean(result["ratio"] for result in results),
        "step_ms": step_ms,
        "modelled_ms": step_ms + wire_ms,
        "loss": statistics.mean(result["loss"] for result in results),
    }


def curve(results, key):
    """Steps, and the mean, smallest and largest over seeds at each of them."""
    columns = list(zip(*([row[key] for row in result["history"]] for result in results)))
    steps = [row["step"] for row in results[0]["history"]]
    return steps, [statistics.mean(c) for c in columns], *zip(*((min(c), max(c)) for c in columns))


def shades(runs):
    """A colour for each run."""
    from matplotlib.colors import LinearSegmentedColormap

    colours, codecs = [], [run.split()[0] for run in runs]
    for i, codec in enumerate(codecs):
        ramp, count = SHADES[codec], codecs.count(codec)
        if len(ramp) == 1:
            colours.append(ramp[0])
        else:
            place = codecs[:i].count(codec) / (count - 1) if count > 1 else 0.5
            colours.append(LinearSegmentedColormap.from_list(codec, ramp)(place))
    return colours


def draw(args, measured):
    """Write the picture. `measured` maps runs to lists of results, one for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 11,
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.edgecolor": FAINT,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": FAINT,
            "grid.linewidth": 0.8,
            "axes.titlesize": 12.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 12,
            "figure.facecolor": PAPER,
        }
    )
    rows = [summarize(run, results, args.mbits) for run, results in measured.items()]
    colours = shades(measured)
    first = next(iter(measured.values()))[0]
    # In inches, from the top: title and legend, curves, bars, table, a line of notes.
    width, left, right, gap = 10.0, 1.1, 0.25, 0.75
    legend_columns = 7
    head = 1.6 + 0.22 * ((len(rows) - 1) // legend_columns)
    heights = {
        "head": head,
        "curves": 3.0,
        "bars": 0.31 * len(rows),
        "table": 0.3 * (len(rows) + 1),
    }
    below = {"head": 0.0, "curves": 1.1, "bars": 0.35, "table": 0.5}
    height = sum(heights.values()) + sum(below.values())
    figure = plt.figure(figsize=(width, height), dpi=150)

    def place(part, column=None):
        """Axes for a part: over the whole width, or left (0) or right (1)."""
        names = list(heights)
        above = names[: names.index(part)]
        bottom = height - sum(heights[n] + below[n] for n in above) - heights[part]
        wide = width - left - right
        x = left
        if column is not None:
            wide = (wide - gap) / 2
            x += column * (wide + gap)
        return figure.add_axes((x / width, bottom / height, wide / width, heights[part] / height))

    by_step, by_time = place("curves", 0), place("curves", 1)
    ratios, times = place("bars", 0), place("bars", 1)
    table = place("table")

    lines = []
    for colour, row, results in zip(colours, rows, measured.values()):
        steps, mean, low, high = curve(results, "test_accuracy")
        mean, low, high = ([100 * y for y in ys] for ys in (mean, low, high))
        step = row["modelled_ms"] / 1e3
        style = {"color": colour, "linewidth": 1.7, "marker": "o", "markersize": 3}
        style["linestyle"] = "--" if row["name"] in ("none", "fp16") else "-"
        lines += by_step.plot(steps, mean, label=row["name"], **style)
        by_time.plot([s * step for s in steps], mean, **style)
        for axes, scale in ((by_step, 1), (by_time, step)):
            axes.fill_between([s * scale for s in steps], low, high, color=colour, alpha=0.15, lw=0)
    by_step.set(title="Accuracy by step", xlabel="steps", ylabel="test accuracy, % (log of error)")
    speed = f"{args.mbits / 1000:g} Gbit/s" if args.mbits >= 1000 else f"{args.mbits:g} Mbit/s"
    by_time.set(title=f"Accuracy by time at {speed}, modelled", xlabel="seconds")
    for axes in (by_step, by_time):
        axes.set_xlim(left=0)
        _stretch_top(axes)

    names = [row["name"] for row in rows]
    _bars(ratios, names, [row["ratio"] for row in rows], colours, "{:.1f}×")
    ratios.set_title("Gradient bytes saved: uncompressed / sent")
    _bars(
        times,
        names,
        [row["modelled_ms"] for row in rows],
        colours,
        "{:.0f} ms",
        [row["step_ms"] for row in rows],
    )
    times.set_title("Step: measured (dark) + wire, modelled")
    times.set_yticklabels([])
    _table(table, rows, speed)

    settings = first["settings"]
    dataset = settings.get("dataset", first["recipe"])
    what = f"{NAMES[settings['model']]} on {NAMES[dataset]}"
    seeds = f"mean of {len(args.seeds)} seeds" if len(args.seeds) > 1 else "one seed"
    spread = " ± half the range over seeds." if len(args.seeds) > 1 else ""
    fastest = " of the fastest seed" if len(args.seeds) > 1 else ""
    x = left / width
    figure.text(x, 1 - 0.33 / height, what, fontsize=18, fontweight="bold", va="center")
    figure.text(
        x,
        1 - 0.64 / height,
        f"{first['ranks']} workers × {settings['batch_size']} images, {first['steps']} steps of "
        f"SGD with momentum, {seeds}; same data and initial weights",
        fontsize=11,
        va="center",
        color="#57606a",
    )
    figure.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(x - 0.008, 1 - 0.78 / height),
        ncols=legend_columns,
        frameon=False,
        handlelength=1.8,
        columnspacing=1.6,
    )
    figure.text(
        x,
        0.2 / height,
        f"Time = median step over loopback{fastest} + counted bytes × hops of the collective / "
        f"{speed}.{spread}",
        fontsize=8.5,
        va="center",
        color="#57606a",
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out)
    return rows


def _stretch_top(axes):
    """Scale by the logarithm of the error: where runs end up is where they differ."""
    axes.set_yscale(
        "function",
        functions=(
            lambda y: -np.log10(np.maximum(100.5 - y, 1e-3)),
            lambda z: 100.5 - 10.0**-z,
        ),
    )
    low, high = axes.dataLim.intervaly
    low = max(low, 100.5 - 12 * (100.5 - high))  # a slow start would take all the room
    low, high = low - (100.5 - low) * 0.1, high + (100.5 - high) * 0.1
    axes.set_ylim(low, high)
    # Round numbers, and between them all others, if there is room for their labels.
    span, kept = np.log10((100.5 - low) / (100.5 - high)), []
    for tick in (90, 99, 50, *range(0, 100, 10), 95, 98, 97, *range(100)):
        places = np.log10((100.5 - tick) / (100.5 - np.array([low, high, *kept])))
        if low <= tick <= high and (abs(places[2:]) > span / 12).all():
            kept.append(tick)
    axes.set_yticks(kept, [f"{t}" for t in kept])
    axes.set_yticks([], minor=True)


def _bars(axes, names, values, colours, form, inner=None):
    places = range(len(names))
    axes.barh(places, values, color=colours, height=0.66, alpha=0.45 if inner else 1)
    if inner:
        axes.barh(places, inner, color=colours, height=0.66)
    for place, value in zip(places, values):
        axes.annotate(
            form.format(value), (value, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.17 * max(values))
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _table(axes, rows, speed):
    axes.set_axis_off()
    head = ["", "test accuracy", "loss", "MB sent", "ratio", "step here", f"at {speed}"]
    spreads = [f"  ±{50 * row['spread']:.2f}" if len(row["accuracies"]) > 1 else "" for row in rows]
    cells = [
        [
            row["name"],
            f"{100 * row['accuracy']:.2f} %{spread}",
            f"{row['loss']:.4f}",
            f"{row['mb']:,.1f}",
            f"{row['ratio']:.1f}×",
            f"{row['step_ms']:.1f} ms",
            f"{row['modelled_ms']:.1f} ms",
        ]
        for row, spread in zip(rows, spreads)
    ]
    edges = (0.0, 0.32, 0.44, 0.57, 0.68, 0.83, 1.0)  # right ends, but for the first column
    height = 1 / (len(rows) + 1)
    for i, line in enumerate([head] + cells):
        y = 1 - (i + 0.5) * height
        for column, (x, text) in enumerate(zip(edges, line)):
            weight = "bold" if i == 0 or column == 0 else "normal"
            axes.text(x, y, text, ha="right" if column else "left", va="center", fontweight=weight)
        if i:
            axes.axhline(1 - i * height, color=FAINT, linewidth=0.8)
    axes.set(xlim=(0, 1), ylim=(0, 1))


# --- The command ------------------------------------------------------------


def print_table(rows, mbits):
    """All rows as Markdown."""
    print("| compression | test accuracy, %, by seed | mean | loss | ratio | MB per rank ", end="")
    print(f"| ms per step | at {mbits:g} Mbit/s |")
    print("| --- |" + " ---: |" * 7)
    for row in rows:
        by_seed = " ".join(f"{100 * accuracy:.2f}" for accuracy in row["accuracies"])
        print(
            f"| {row['name']} | {by_seed} | {100 * row['accuracy']:.2f} | {row['loss']:.4f} "
            f"| {row['ratio']:.2f} | {row['mb']:.2f} "
            f"| {row['step_ms']:.1f} | {row['modelled_ms']:.1f} |"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s RECIPE [options] [-- options of the recipe]",
    )
    add = parser.add_argument
    add("recipe", choices=("mnist", "cifar", "imagenet"))
    add(
        "--runs",
        nargs="+",
        default=RUNS,
        metavar="RUN",
        help="compressions, each with its options if quoted; by default: " + ", ".join(RUNS),
    )
    add("--seeds", nargs="+", type=int, default=[1])
    add("--ranks", type=int, default=2)
    add("--mbits", type=float, default=1000, help="bandwidth of the modelled network, in Mbit/s")
    add("--out", type=Path, default=Path("compare.png"), help="picture to write (png, svg or pdf)")
    add("--redraw", action="store_true", help="draw what has been measured, run nothing")
    own, recipe_options = launch.split_options(sys.argv[1:])
    args = parser.parse_args(own)
    args.recipe_options = recipe_options
    args.folder = args.out.with_suffix("")
    for run in args.runs:
        if run.split()[:1] not in [[codec] for codec in SHADES]:
            parser.error(f"a run starts with one of {', '.join(SHADES)}, not as {run!r} does")

    measured = {}
    for run in args.runs:
        results = [r for r in (measure(args, run, seed) for seed in args.seeds) if r]
        if results:
            measured[run] = results
    if not measured:
        parser.error("nothing has been measured")
    print_table(draw(args, measured), args.mbits)
    print(args.out, file=sys.stderr)


if __name__ == "__main__":
    main()
