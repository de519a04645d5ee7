"""Memory of a rank: how much more than without compression, and whether it stays flat.

    python benchmarks/memory.py [--set d] [--steps 1000]

One job of two local ranks for each compressor. Every step makes new gradients, as backpropagation
does, and reduces them in one group. Peak and current resident memory are those of rank 0.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from step import COMPRESSORS, SETS


def resident(field):
    """``VmHWM`` (the peak) or ``VmRSS`` (now) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def reduce_in_steps(name, which, steps):
    """One rank's part of a job; rank 0 prints its memory after a fifth of the steps, its memory at
    the end, and the peak."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    compressor = COMPRESSORS[name]()
    tf.random.set_seed(hvd.rank())
    base = [tf.random.normal(shape, stddev=2.0**-13) for shape in SETS[which]()]

    @tf.function
    def step(scale):
        gradients = [tensor * scale for tensor in base]
        reduced = hvd.grouped_allreduce(gradients, compression=compressor)
        return [tf.reduce_sum(tensor) for tensor in reduced]

    figures = []
    for i in range(1, steps + 1):
        step(tf.constant(1.0 + i % 7))
        if i in (steps // 5, steps):
            figures.append(resident("VmRSS"))
    if hvd.rank() == 0:
        print("figures", *figures, resident("VmHWM"), flush=True)


def main():
    if sys.argv[1:2] == ["--worker"]:
        return reduce_in_steps(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="d", help="shapes of the gradients")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--compressors",
        nargs="+",
        choices=COMPRESSORS,
        default=["none", "fec", "ternary", "twobit"],
    )
    args = parser.parse_args()
    dense = sum(4 * int(np.prod(shape)) for shape in SETS[args.set]())
    print(f"set {args.set}: {dense / 1e6:.1f} MB of gradients, {args.steps} steps; MB")
    print("| compression | peak | more than the first, in gradients | growth of memory in use |")
    print("| --- | ---: | ---: | ---: |")
    first = None
    for name in args.compressors:
        run = Path(sys.executable).with_name("horovodrun")
        worker = [sys.executable, __file__, "--worker", name, args.set, str(args.steps)]
        done = subprocess.run(
            [run, "-np", "2", *worker], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            sys.exit(done.stdout[-4000:])
        line = next(line for line in done.stdout.splitlines() if "figures " in line)
        early, late, peak = (int(word) for word in line.split("figures ")[1].split())
        first = first or peak
        print(
            f"| {name} | {peak / 1e6:.0f} | {(peak - first) / dense:.2f} "
            f"| {(late - early) / 1e6:+.1f} after step {args.steps // 5} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
