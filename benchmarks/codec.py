"""Codec speed and payload size in one process, as ratios to an in-place add of the same arrays.

    python benchmarks/codec.py [--size 25000000] [--forms planes coded] [--densities 0.01 0.05]

The add, ``np.add(residual, gradient, out=residual)``, moves the bytes that an encoder with error
feedback has to move, so its time is the yardstick that holds on any machine. Every round measures
the add and the codec one after the other; the table gives the median of the rounds' ratios, with
the smallest and the largest.
"""

import argparse
import itertools
import json
import os

from hvd_fec.cli import bench
from hvd_fec.codecs.kernels import active as kernels

DENSITIES = (0.05, 0.01)
FORMS = ("planes",)


def measure(size, density, form, threads, rounds):
    os.environ["HVD_FEC_NUM_THREADS"] = str(threads)
    row = bench.fec(size, density, form, rounds)
    return {"density": density, "form": form, "threads": threads, **row}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=25_000_000, help="float32 elements")
    parser.add_argument(
        "--rounds", type=int, default=10, help="each with a gradient and its negative"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--forms", nargs="+", default=FORMS, help="planes, coded")
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES, help="0 to 1")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    print(f"{args.size} float32, kernels: {kernels.isa()}; times are ratios to the in-place add\n")
    print(
        "density  form    threads    add ms   encode                decode_add            "
        "ratio  /entropy"
    )
    rows = []
    for density, form in itertools.product(args.densities, args.forms):
        for threads in args.threads:
            row = measure(args.size, density, form, threads, args.rounds)
            rows.append(row)
            spread = ["{:5.2f} ({:.2f}-{:.2f})".format(*row[n]) for n in ("encode", "decode_add")]
            print(
                f"{density:7.2%}  {form:6}  {threads:7d}  {row['add_ms']:8.2f}   {spread[0]:20}  "
                f"{spread[1]:20}  {row['ratio']:5.1f}  {row['entropy']:8.2f}"
            )
        one, *others = [r for r in rows if (r["density"], r["form"]) == (density, form)]
        for other in others:
            print(
                f"         {other['threads']} threads against {one['threads']}: encode "
                f"{one['encode_ms'] / other['encode_ms']:.2f} times as fast, decode_add "
                f"{one['decode_add_ms'] / other['decode_add_ms']:.2f} times"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
