"""Bytes that an exchange puts on the wire, counted at the interface, next to what formulas say.

    sudo benchmarks/netns.sh unlimited -- .venv/bin/python benchmarks/wire_bytes.py [--ranks 2 4]
    ... --ranks 8 --compression none fec-allgather fec-twoshot

Run it on a network of its own, as above: it counts all that passes the loopback interface while
two jobs of local ranks reduce the same tensor, one a few steps and one more; the difference is
what those steps cost, without start-up and end. Bytes are per rank, step and value. Gradients are
new in each step. FEC's formulas are in payloads, taken to be what a rank hands to its allgather.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

STEPS = (10, 40)
SIGMA = 2.0**-9 / 5
FORMULAS = {
    "none": lambda n: 2 * (n - 1) / n * 4,
    "fp16": lambda n: 2 * (n - 1) / n * 2,
    # 3 and fewer ranks gather words of 40 values, more add up words of as many as fit
    "ternary": lambda n: (n - 1) * 8 / 40 if n <= 3 else 2 * (n - 1) / n * 8 / digits(n),
}
FORMULAS["twobit"] = FORMULAS["ternary"]
PAYLOADS = {"fec-allgather": lambda n: n - 1, "fec-twoshot": lambda n: 2 * (n - 1) / n}


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
    kind, _, way = compression.partition("-")
    compressor = getattr(hvd_fec.Compression, kind)
    if way:
        compressor = hvd_fec.FEC(threshold=-9, exchange=way)

    @tf.function
    def step(number):
        gradient = SIGMA * tf.random.stateless_normal([size], [hvd.rank(), number])
        return tf.reduce_sum(hvd.allreduce(gradient, compression=compressor))

    for i in range(steps):
        step(tf.constant(i))
    if hvd.rank() == 0:
        print("handed over", compressor.stats.bytes_sent if way else 0, flush=True)


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
    handed = re.search("handed over ([0-9]+)", done.stdout)
    return np.array([(interface_bytes() - before) / ranks, int(handed[1])])


def main():
    if sys.argv[1:2] == ["--worker"]:
        compression, size, steps = sys.argv[2:]
        return reduce_in_steps(compression, int(size), int(steps))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=4_000_000, help="values in the tensor")
    parser.add_argument(
        "--compression", nargs="+", choices=[*FORMULAS, *PAYLOADS], default=["none", "ternary"]
    )
    args = parser.parse_args()
    print(
        "| ranks | compression | counted | formula | counted / formula | payloads | none / this |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for ranks in args.ranks:
        none = payload = None
        for compression in args.compression:
            few, many = (job_bytes(ranks, compression, args.size, steps) for steps in STEPS)
            counted, handed = (many - few) / (STEPS[1] - STEPS[0]) / args.size
            if compression == "none":
                none = counted
            if compression == "fec-allgather":
                payload = handed
            if compression in FORMULAS:
                formula = FORMULAS[compression](ranks)
            elif payload is None:
                parser.error("fec-twoshot is counted in payloads of fec-allgather, named before it")
            else:
                formula = PAYLOADS[compression](ranks) * payload
            gain = f"{none / counted:.2f}" if none else ""
            payloads = f"{counted / payload:.2f}" if payload else ""
            print(
                f"| {ranks} | {compression} | {counted:.4f} | {formula:.4f} "
                f"| {counted / formula:.3f} | {payloads} | {gain} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
