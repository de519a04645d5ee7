"""Does it matter how the training data is shared out? Accuracy by sharding, over seeds.

    python benchmarks/sharding.py --data-dir ~/mnist
    python benchmarks/sharding.py --recipe cifar --data-dir ~/data -- --epochs 10

The training data is ordered by label first, as class directories are. Then the
recipe is trained with contiguous, random and stratified shards: same seeds, same
initial weights, same number of steps. The table has the test accuracy of every
seed, its mean and standard deviation, and the difference to random shards, seed
by seed. What follows -- goes to the recipe.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SHARDINGS = ("contiguous", "random", "stratified")


def run(args, sharding, seed):
    """The recipe's result line."""
    command = [
        *("horovodrun", "-np", str(args.ranks), sys.executable, str(RECIPES / f"{args.recipe}.py")),
        *("--sharding", sharding, "--seed", str(seed), "--label-sorted"),
        *("--compression", args.compression),
        *(["--data-dir", args.data_dir] if args.data_dir else []),
        *args.recipe_options,
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if '{"recipe"' in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"[-4000:])
    return json.loads(lines[-1][lines[-1].index("{") :])


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main():
    own, options = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, options = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--recipe", choices=("mnist", "cifar"), default="mnist")
    add("--compression", default="none")
    add("--ranks", type=int, default=4)
    add("--seeds", type=int, default=5, help="number of seeds")
    add("--data-dir")
    add("--json", help="also write all results to this file")
    args = parser.parse_args(own)
    args.recipe_options = options

    results = {sharding: [] for sharding in SHARDINGS}
    for seed in range(1, args.seeds + 1):
        for sharding in SHARDINGS:
            results[sharding].append(run(args, sharding, seed))
            result = results[sharding][-1]
            print(f"seed {seed}  {sharding:10}  {100 * result['test_accuracy']:.2f} %", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))

    one = results["random"][0]
    print(
        f"\n{one['recipe']} ({one['data']}), {args.ranks} ranks, {one['steps']} steps, "
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


if __name__ == "__main__":
    main()
