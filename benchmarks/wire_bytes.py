"""Bytes that an exchange puts on the wire, counted at the interface, next to what formulas say.

    sudo benchmarks/netns.sh unlimited -- .venv/bin/python benchmarks/wire_bytes.py [--ranks 2 4]

Run it on a network of its own, as above: it counts all that passes the loopback interface while
two jobs of local ranks reduce the same tensor, one a few steps and one more; the difference is
what those steps cost, without start-up and end. Bytes are per rank, step and value.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

STEPS = (5, 25)
FORMULAS = {
    "none": lambda n: 2 * (n - 1) / n * 4,
    "fp16": lambda n: 2 * (n - 1) / n * 2,
    # 3 and fewer ranks gather words of 40 values, more add up words of as many as fit
    "ternary": lambda n: (n - 1) * 8 / 40 if n <= 3 else 2 * (n - 1) / n * 8 / digits(n),
}
FORMULAS["twobit"] = FORMULAS["ternary"]


def digits(ranks):
    """Base-(2n+1) digits in 64 bits."""
    count = 0
    while (2 * ranks + 1) ** (count + 1) < 2**64:
        count += 1
    return count


def reduce_in_steps(compression, size, steps):
    """One rank's part of a job."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd_fec

    hvd.init()
    compressor = getattr(hvd_fec.Compression, compression)
    tf.random.set_seed(hvd.rank())
    gradient = tf.random.normal([size])

    @tf.function
    def step(scale):
        return tf.reduce_sum(hvd.allreduce(gradient * scale, compression=compressor))

    for i in range(steps):
        step(tf.constant(1.0 + i))


def interface_bytes():
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def job_bytes(ranks, compression, size, steps):
    before = interface_bytes()
    worker = [sys.executable, __file__, "--worker", compression, str(size), str(steps)]
    run = Path(sys.executable).with_name("horovodrun")
    done = subprocess.run(
        [run, "-np", str(ranks), "--network-interfaces", "lo", *worker],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    return interface_bytes() - before


def main():
    if sys.argv[1:2] == ["--worker"]:
        compression, size, steps = sys.argv[2:]
        return reduce_in_steps(compression, int(size), int(steps))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=4_000_000, help="values in the tensor")
    parser.add_argument("--compression", nargs="+", choices=FORMULAS, default=["none", "ternary"])
    args = parser.parse_args()
    print("| ranks | compression | counted | formula | counted / formula | none / this |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for ranks in args.ranks:
        none = None
        for compression in args.compression:
            few, many = (job_bytes(ranks, compression, args.size, steps) for steps in STEPS)
            counted = (many - few) / (STEPS[1] - STEPS[0]) / ranks / args.size
            if compression == "none":
                none = counted
            formula = FORMULAS[compression](ranks)
            gain = f"{none / counted:.2f}" if none else ""
            print(
                f"| {ranks} | {compression} | {counted:.4f} | {formula:.4f} "
                f"| {counted / formula:.3f} | {gain} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
