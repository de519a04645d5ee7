"""Train a recipe with every compressor and print a table of accuracy, bytes and time.

    .venv/bin/python benchmarks/recipes.py --data-dir FOLDER [--ranks 2] [--epochs 1] [--seed 1 2]

All rows start from the same weights and see the same batches. Seconds are of training only, and
of this machine; with local ranks the network is the loopback interface.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROWS = {
    "none": [],
    "fp16": [],
    "twobit, 0.5": ["--twobit-threshold", "0.5"],
    "twobit, 0.01": ["--twobit-threshold", "0.01"],
    "ternary, threshold": ["--rounding", "threshold"],
    "ternary, stochastic": ["--rounding", "stochastic"],
    "ternary, stochastic, clipped": ["--rounding", "stochastic", "--clip-sigma", "2.5"],
    "fec, -9": ["--threshold", "-9"],
    "fec, -7": ["--threshold", "-7"],
    "fec, -6": ["--threshold", "-6"],
}
RECIPES = Path(__file__).parents[1] / "recipes"


def run(recipe, ranks, arguments):
    """The recipe's result line."""
    done = subprocess.run(
        [
            Path(sys.executable).with_name("horovodrun"), "-np", str(ranks),
            sys.executable, RECIPES / f"{recipe}.py", *map(str, arguments),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    lines = [line.partition(":")[2] for line in done.stdout.splitlines()]
    results = [line for line in lines if line.startswith("{")]
    if done.returncode or not results:
        sys.exit(done.stdout[-4000:])
    return json.loads(results[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mnist")
    parser.add_argument("--data-dir", help="passed on to the recipe")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args()
    data = ["--data-dir", args.data_dir] if args.data_dir else []
    print("| compression | test accuracy, % | loss | ratio | MB per rank | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in args.rows:
        compression = row.partition(",")[0]
        results = [
            run(
                args.recipe, args.ranks,
                ["--compression", compression, "--epochs", args.epochs, "--seed", seed]
                + ROWS[row] + data,
            )
            for seed in args.seed
        ]  # fmt: skip
        accuracies = " ".join(f"{100 * result['test_accuracy']:.2f}" for result in results)
        loss, ratio, sent, seconds = (
            statistics.mean(result[key] for result in results)
            for key in ("loss", "ratio", "mb_sent", "seconds")
        )
        print(
            f"| {row} | {accuracies} | {loss:.4f} | {ratio:.2f} | {sent:.2f} | {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
