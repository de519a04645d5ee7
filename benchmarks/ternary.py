"""Speed of the ternary kernels in one thread, as ratios to an in-place add of the same arrays.

    python benchmarks/ternary.py [--size 25000000] [--ranks 2 4 8] [--rounds 15]

The add, ``np.add(residual, gradient, out=residual)``, is the yardstick of ``codec.py``. Every round
measures it and the kernels one after the other; the table gives the ratio of the medians and, in
brackets, that of the smallest times, which other work on the machine disturbs least.
"""

import argparse
import os
import statistics
import time

os.environ["HVD_FEC_NUM_THREADS"] = "1"

import numpy as np

from hvd_fec.codecs import TernaryCodec
from hvd_fec.codecs.kernels import active as kernels
from hvd_fec.codecs.ternary import gathers, survey


def seconds(function):
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    gradient = np.random.default_rng(0).standard_normal(args.size, np.float32)
    total, residual, out = (np.zeros_like(gradient) for _ in range(3))
    step = 1.25
    jobs = {
        "add": lambda: np.add(total, gradient, out=total),
        "survey": lambda: survey(gradient, residual),
    }
    for ranks in args.ranks:
        codec = TernaryCodec(ranks)
        words = np.zeros(codec.words(args.size), np.int64)
        name = f", sum of {ranks}"
        jobs |= {
            "threshold, residual, pack" + name: lambda codec=codec, words=words: codec.encode(
                gradient, step, step / 2, words, residual
            ),
            "draw, pack" + name: lambda codec=codec, words=words: codec.draw(
                gradient, 5.0, 12345, words
            ),
            "unpack" + name: lambda codec=codec, words=words: codec.decode(words[None], 0.5, out),
        }
        if gathers(ranks):
            one = TernaryCodec(1)
            rows = np.zeros((ranks, one.words(args.size)), np.int64)
            jobs[f"unpack, {ranks} gathered"] = lambda one=one, rows=rows: one.decode(
                rows, 0.5, out
            )
    times = {name: [] for name in jobs}
    for _ in range(args.rounds):
        for name, job in jobs.items():
            times[name].append(seconds(job))
    add = times.pop("add")
    print(f"{kernels.isa()}, {args.size} float32, add {1e3 * statistics.median(add):.1f} ms\n")
    print("| work | median (smallest), ratio to the add |\n| --- | ---: |")
    for name, taken in times.items():
        median = statistics.median(taken) / statistics.median(add)
        print(f"| {name} | {median:.2f} ({min(taken) / min(add):.2f}) |")


if __name__ == "__main__":
    main()
