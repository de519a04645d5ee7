"""How near are shards to the whole, what does it cost, and does it matter?

    python benchmarks/sharding.py distance --data-dir ~/mnist
    python benchmarks/sharding.py accuracy --data-dir ~/mnist
    python benchmarks/sharding.py accuracy --recipe cifar --data-dir ~/data -- --epochs 10

`distance` shares MNIST out by brightness and contrast of the images, over seeds. By statistic it
prints how far the shards are from the whole (root mean square over shards, mean over seeds), for
random and for stratified shards. Then come hard cases, and the seconds for many labels.

`accuracy` orders the training data by label first, as class directories are, and trains the recipe
with contiguous, random and stratified shards: same seeds, same initial weights, same number of
steps. The table has the test accuracy of every seed, its mean and standard deviation, and the
difference to random shards, seed by seed. What follows -- goes to the recipe.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from hvd_fec.sharding import image_features, random_shard, shard_report, stratified_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import data
import launch

SHARDINGS = ("contiguous", "random", "stratified")
MILLION = 10**6


# --- Distance ---------------------------------------------------------------


def off_ideal(report):
    """The largest difference to the ideal count of a class in a shard, in samples."""
    return np.abs(report.counts - report.whole_counts / len(report.lengths)).max()


def distances(report):
    """Of each statistic, the distance to the whole: root mean square over shards.

    Means are off by so many standard deviations of the whole, variances by so much of the whole's.
    """
    # The variance of all pixels of a shard: of the images' means, and inside the images.
    second = report.mean[:, 1] ** 2 + report.variance[:, 1]
    whole_second = report.whole_mean[1] ** 2 + report.whole_variance[1]
    pixels = (report.variance[:, 0] + second) / (report.whole_variance[0] + whole_second)
    off = {
        "brightness, mean": report.mean_shift[:, 0],
        "brightness, variance": report.variance_ratio[:, 0] - 1,
        "contrast, mean": report.mean_shift[:, 1],
        "contrast, variance": report.variance_ratio[:, 1] - 1,
        "all pixels, variance": pixels - 1,
    }
    return {name: float(np.sqrt(np.mean(np.square(values)))) for name, values in off.items()}


def distance(args):
    dataset = data.read_mnist_folder(args.data_dir)
    labels, features = dataset.train_labels, image_features(dataset.train_images)
    print(f"MNIST, {len(labels)} images, mean of {args.seeds} seeds\n")
    print("| shards | statistic | random | stratified | times nearer |")
    print("| ---: | --- | ---: | ---: | ---: |")
    worst = []
    for size in args.sizes:
        sums = {sharder: {} for sharder in ("random", "stratified")}
        off = dict.fromkeys(sums, 0.0)
        for seed in range(args.seeds):
            for sharder in sums:
                report = shard_report(labels, size, features=features, sharder=sharder, seed=seed)
                assert (report.lengths == len(labels) // size).all()
                off[sharder] = max(off[sharder], off_ideal(report))
                for name, value in distances(report).items():
                    sums[sharder][name] = sums[sharder].get(name, 0.0) + value / args.seeds
        for name, random in sums["random"].items():
            ours = sums["stratified"][name]
            print(f"| {size} | {name} | {random:.2e} | {ours:.2e} | {random / ours:.0f} |")
        worst.append((size, off["random"], off["stratified"]))
    print("\n| shards | samples off a class's ideal count, at most: random | stratified |")
    print("| ---: | ---: | ---: |")
    for size, random, ours in worst:
        print(f"| {size} | {random:.1f} | {ours:.2f} |")
    hard_cases()
    many_labels(args)


def hard_cases():
    rng = np.random.default_rng(0)
    print("\n| case | shards | length of each | samples off a class's ideal count, at most |")
    print("| --- | ---: | ---: | ---: |")
    cases = {
        "a label that occurs once": np.append(rng.integers(0, 10, 9_999), 10),
        "1,000 classes, 50 of each": np.repeat(np.arange(1000), 50),
        "1,000 classes, from 1 to 1,000 of each": np.repeat(np.arange(1000), np.arange(1, 1001)),
    }
    for name, labels in cases.items():
        for size in (2, 8, 64):
            report = shard_report(labels, size)
            [length] = set(report.lengths)
            print(f"| {name} | {size} | {length} | {off_ideal(report):.2f} |")


def many_labels(args):
    n = args.labels
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 1000, n)
    features = rng.normal(size=(n, 2))
    cases = {
        "random": lambda: random_shard(n, 3, 64),
        "stratified, labels": lambda: stratified_shard(labels, 3, 64),
        "labels and 2 features": lambda: stratified_shard(labels, 3, 64, features=features),
        "labels, features, batches of 64": lambda: stratified_shard(
            labels, 3, 64, features=features, batch_size=64
        ),
    }
    print(f"\n| {n / MILLION:g} million labels of 1,000 classes, 64 shards | seconds |")
    print("| --- | ---: |")
    for name, call in cases.items():
        seconds = []
        for _ in range(args.repeats):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        print(f"| {name} | {statistics.median(seconds):.2f} |", flush=True)


# --- Accuracy ---------------------------------------------------------------


def accuracy(args):
    results = {sharding: [] for sharding in SHARDINGS}
    for seed in range(1, args.seeds + 1):
        for sharding in SHARDINGS:
            options = ["--sharding", sharding, "--seed", seed, "--label-sorted"]
            options += ["--compression", args.compression]
            options += ["--data-dir", args.data_dir] if args.data_dir else []
            result = launch.run(args.recipe, args.ranks, [*options, *args.recipe_options])
            results[sharding].append(result)
            print(
                f"seed {seed}  {sharding:10}  {100 * result['test_accuracy']:.2f} %",
                file=sys.stderr,
                flush=True,
            )
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1))

    one = results["random"][0]
    print(
        f"{one['recipe']} ({one['data']}), {args.ranks} ranks, {one['steps']} steps, "
        f"compression {args.compression}; test accuracy in %\n"
    )
    seeds = [f"seed {seed}" for seed in range(1, args.seeds + 1)]
    print("| sharding | " + " | ".join(seeds) + " | mean | std. dev. | minus random |")
    print("| --- |" + " ---: |" * (args.seeds + 3))
    accuracy = {s: [100 * r["test_accuracy"] for r in results[s]] for s in SHARDINGS}
    for sharding in SHARDINGS:
        values = accuracy[sharding]
        apart = [a - b for a, b in zip(values, accuracy["random"])]
        cells = [f"{value:.2f}" for value in values]
        cells += [f"{statistics.mean(values):.2f}", f"{spread(values):.2f}"]
        cells += [f"{statistics.mean(apart):+.2f} ± {spread(apart):.2f}"]
        print(f"| {sharding} | " + " | ".join(cells) + " |")


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


# --- The command ------------------------------------------------------------


def main():
    own, recipe_options = launch.split_options(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("distance")
    command.set_defaults(run=distance)
    add = command.add_argument
    add("--sizes", type=int, nargs="+", default=[2, 8, 64], help="numbers of shards")
    add("--seeds", type=int, default=20, help="number of seeds")
    add("--labels", type=int, default=10 * MILLION, help="so many labels for the timing")
    add("--repeats", type=int, default=3, help="of which the median is taken")
    add("--data-dir", required=True, help="folder of the MNIST files")

    command = commands.add_parser("accuracy")
    command.set_defaults(run=accuracy, recipe_options=recipe_options)
    add = command.add_argument
    add("--recipe", choices=("mnist", "cifar"), default="mnist")
    add("--compression", default="none")
    add("--ranks", type=int, default=4)
    add("--seeds", type=int, default=5, help="number of seeds")
    add("--data-dir")
    add("--json", help="also write all results to this file")

    args = parser.parse_args(own)
    args.run(args)


if __name__ == "__main__":
    main()
