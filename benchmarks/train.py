"""Training speed of a recipe on limited networks, compression by compression.

    python benchmarks/train.py --rates 100mbit 1gbit -- mnist --model mlp --limit-steps 60
    python benchmarks/train.py --rates 1gbit --target 0.97 -- mnist --epochs 3 --eval-steps 50

What follows ``--`` is a recipe of ../recipes and its options. Every compression trains at every
rate, in a network namespace whose loopback is limited to it (see netns.sh; needs root). The table
gives the median step, how many times faster than ``none`` and ``fp16`` that is, and, with
``--target``, the training seconds until the test accuracy first reached it.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "recipes"


def train(rate, ranks, compression, recipe, options):
    """The recipe's result line."""
    command = [
        *(HERE / "netns.sh", rate, "--", Path(sys.executable).with_name("horovodrun")),
        *("-np", str(ranks), sys.executable, RECIPES / f"{recipe}.py"),
        *("--compression", *compression.split(), *options),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = re.findall(r'\{"recipe".*\}', done.stdout)
    if not lines:
        sys.exit(f"{recipe} with {compression} gave no result:\n{done.stdout}")
    return json.loads(lines[-1])


def seconds_to(target, result):
    """Training seconds when the test accuracy first reached ``target``, None if it never did."""
    reached = [row["seconds"] for row in result["history"] if row["test_accuracy"] >= target]
    return reached[0] if reached else None


def main():
    own, recipe = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, recipe = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "unlimited"])
    parser.add_argument(
        "--compressions",
        nargs="+",
        default=["none", "fp16", "fec", "ternary"],
        help="names, each with its options if quoted: 'fec --threshold -6'",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target", type=float, help="test accuracy to reach")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args(own)
    if not recipe:
        parser.error("name a recipe after --, for example: -- mnist --limit-steps 50")

    results = []
    for rate in args.rates:
        print(f"{' '.join(recipe)}, {args.ranks} ranks, {rate}")
        print(
            "compression               ms/step  than none  than fp16    ratio  accuracy  to target"
        )
        steps = {}
        for compression in args.compressions:
            result = train(rate, args.ranks, compression, recipe[0], recipe[1:])
            results.append({"rate": rate, **result})
            steps[compression] = result["step_ms"]
            faster = [
                f"{steps[other] / steps[compression]:9.2f}x" if other in steps else " " * 10
                for other in ("none", "fp16")
            ]
            reached = seconds_to(args.target, result) if args.target else None
            print(
                f"{compression:22}  {result['step_ms']:9.1f} {faster[0]} {faster[1]} "
                f"{result['ratio']:8.1f}  {result['test_accuracy']:8.4f}  "
                + (f"{reached:7.1f} s" if reached is not None else "-" if args.target else ""),
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
