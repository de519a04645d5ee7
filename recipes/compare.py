"""Run a recipe with several compressions and draw what each costs and gives.

    python recipes/compare.py cifar --out cifar.png -- --data-dir ~/data --epochs 4 --eval-steps 40

What follows -- goes to the recipe. Every run has the same seeds, data order and
steps. The results are kept next to the picture, in a folder of its name, and
not measured again: after a cut-off the rest is run, and with --redraw nothing.

Time is a model: the measured step on this machine, plus what the network of
--mbits would add to move the bytes that were counted (see wire_factor).
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from hvd_fec.cost import two_shot_pays

# Name in the picture -> the recipe's options, and colour. Neutral for the ones to compare
# with, one hue per codec, darker for what sends less.
RUNS = {
    "none": (["--compression", "none"], "#8a8f98"),
    "fp16": (["--compression", "fp16"], "#3f4650"),
    "twobit 0.01": (["--compression", "twobit", "--twobit-threshold", "0.01"], "#d9852b"),
    "ternary": (["--compression", "ternary"], "#2f9e6e"),
    "fec -9": (["--compression", "fec", "--threshold", "-9"], "#86a8ee"),
    "fec -7": (["--compression", "fec", "--threshold", "-7"], "#2f6bde"),
    "fec -5": (["--compression", "fec", "--threshold", "-5"], "#14337a"),
}
INK, FAINT, PAPER = "#1c2128", "#d9dde3", "#ffffff"
HERE = Path(__file__).resolve().parent


# --- Measuring --------------------------------------------------------------


def measure(args, name, seed):
    """The result line of one run, from the cache or from horovodrun; None if it fails."""
    options, _ = RUNS[name]
    command = [
        *("horovodrun", "-np", str(args.ranks), sys.executable, str(HERE / f"{args.recipe}.py")),
        *args.recipe_options,
        *options,
        *("--seed", str(seed)),
    ]
    # Another command is another experiment, even under the same name.
    digest = hashlib.sha256(json.dumps(command[2:3] + command[4:]).encode()).hexdigest()[:10]
    cached = args.folder / f"{name.replace(' ', '')}-seed{seed}-{digest}.json"
    if cached.exists():
        return json.loads(cached.read_text())
    if args.redraw:
        return None
    print(f"running {name}, seed {seed}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path},
    )
    lines = [line for line in done.stdout.splitlines() if '{"recipe"' in line]
    if done.returncode or not lines:
        said = [line for line in done.stdout.splitlines() if line.startswith("[")]  # by a rank
        print(f"{name} failed and is left out:", *said[-20:], sep="\n", file=sys.stderr)
        return None
    result = json.loads(lines[-1][lines[-1].index("{") :])
    args.folder.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps(result, indent=1))
    return result


def wire_factor(name, ranks, dense_bytes):
    """Bytes that a rank sends to the network for each byte it gives away.

    A ring allreduce moves 2 (n - 1) / n times its input through each rank, a
    gather of all payloads n - 1 times one. In two shots a rank gives away a
    payload and the n-th part of one, of which it keeps a part and passes the
    other on n - 1 times.
    """
    if not name.startswith("fec"):
        return 2 * (ranks - 1) / ranks
    if two_shot_pays(ranks, dense_bytes):
        return 2 * (ranks - 1) / (ranks + 1)
    return ranks - 1


def modelled_seconds(name, result, mbits):
    """Seconds per step: as measured here, and on the wire on top of that."""
    steps = result["steps"] - result["first_step"]
    sent, dense = (1e6 * result[key] / steps for key in ("mb_sent", "mb_dense"))
    sent *= wire_factor(name, result["ranks"], dense)
    return result["step_ms"] / 1e3 + 8 * sent / (1e6 * mbits)


# --- Drawing ----------------------------------------------------------------


def summarize(name, results, mbits):
    """One row of the table: means over seeds, and the spread of the accuracy."""
    accuracies = [result["test_accuracy"] for result in results]
    return {
        "name": name,
        "seeds": len(results),
        "accuracy": statistics.mean(accuracies),
        "spread": max(accuracies) - min(accuracies),
        "mb": statistics.mean(result["mb_sent"] for result in results),
        "ratio": statistics.mean(result["ratio"] for result in results),
        "step_ms": statistics.mean(result["step_ms"] for result in results),
        "modelled_ms": 1e3
        * statistics.mean(modelled_seconds(name, result, mbits) for result in results),
        "loss": statistics.mean(result["loss"] for result in results),
    }


def curve(results, key):
    """Steps, and the mean, smallest and largest over seeds at each of them."""
    columns = list(zip(*([row[key] for row in result["history"]] for result in results)))
    steps = [row["step"] for row in results[0]["history"]]
    return steps, [statistics.mean(c) for c in columns], *zip(*((min(c), max(c)) for c in columns))


def draw(args, measured):
    """Write the picture. `measured` maps names to lists of results, one for each seed."""
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
    rows = [summarize(name, results, args.mbits) for name, results in measured.items()]
    first = next(iter(measured.values()))[0]
    # In inches, from the top: title and legend, curves, bars, table, a line of notes.
    width, left, right, gap = 10.0, 1.1, 0.25, 0.75
    heights = {"head": 1.5, "curves": 3.0, "bars": 0.31 * len(rows), "table": 0.3 * (len(rows) + 1)}
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
    for name, results in measured.items():
        colour = RUNS[name][1]
        steps, mean, low, high = curve(results, "test_accuracy")
        mean, low, high = ([100 * y for y in ys] for ys in (mean, low, high))
        step = statistics.mean(modelled_seconds(name, r, args.mbits) for r in results)
        style = {"color": colour, "linewidth": 1.7, "marker": "o", "markersize": 3}
        style["linestyle"] = "--" if name in ("none", "fp16") else "-"
        lines += by_step.plot(steps, mean, label=name, **style)
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
    colours = [RUNS[name][1] for name in names]
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
    model = settings.get("model", "small CNN")
    dataset = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}.get(settings.get("dataset"))
    what = f"{model} on {dataset or {'mnist': 'MNIST', 'imagenet': 'ImageNet'}[first['recipe']]}"
    seeds = f"mean of {len(args.seeds)} seeds" if len(args.seeds) > 1 else "one seed"
    spread = " ± half the range over seeds." if len(args.seeds) > 1 else ""
    x = left / width
    figure.text(x, 1 - 0.33 / height, what, fontsize=18, fontweight="bold", va="center")
    figure.text(
        x,
        1 - 0.64 / height,
        f"{first['ranks']} workers, {first['steps']} steps of {settings['batch_size']} images "
        f"each, SGD with momentum, {seeds}; same data and initial weights",
        fontsize=11,
        va="center",
        color="#57606a",
    )
    figure.legend(
        handles=lines,
        loc="center left",
        bbox_to_anchor=(x - 0.008, 1 - 0.94 / height),
        ncols=len(rows),
        frameon=False,
        handlelength=1.8,
        columnspacing=1.6,
    )
    figure.text(
        x,
        0.2 / height,
        "Time = median step measured over loopback + counted bytes × hops of the collective / "
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
    spreads = [f"  ±{50 * row['spread']:.2f}" if row["seeds"] > 1 else "" for row in rows]
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s RECIPE [options] [-- options of the recipe]",
    )
    add = parser.add_argument
    add("recipe", choices=("mnist", "cifar", "imagenet"))
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    add("--seeds", nargs="+", type=int, default=[1])
    add("--ranks", type=int, default=2)
    add("--mbits", type=float, default=1000, help="bandwidth of the modelled network, in Mbit/s")
    add("--out", type=Path, default=Path("compare.png"), help="picture to write (png, svg or pdf)")
    add("--redraw", action="store_true", help="draw what has been measured, run nothing")
    own, options = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, options = own[:cut], own[cut + 1 :]
    args = parser.parse_args(own)
    args.recipe_options = options
    args.folder = args.out.with_suffix("")

    measured = {}
    for name in args.runs:
        results = [r for r in (measure(args, name, seed) for seed in args.seeds) if r]
        if results:
            measured[name] = results
    if not measured:
        parser.error("nothing has been measured")
    rows = draw(args, measured)
    print(f"{'':11} accuracy  spread     loss    MB sent   ratio  step ms  modelled ms")
    for row in rows:
        print(
            f"{row['name']:11} {row['accuracy']:8.4f}  {row['spread']:6.4f}  {row['loss']:7.4f} "
            f"{row['mb']:10.1f} {row['ratio']:7.1f} {row['step_ms']:8.1f} "
            f"{row['modelled_ms']:12.1f}"
        )
    print(args.out)


if __name__ == "__main__":
    main()
