"""Is the gradient traffic all that training sends? Bytes counted by the network interface.

    python benchmarks/local_parameters.py [--ranks 2] [--steps 100]

Runs in a network namespace of its own (Linux; as root, or where users may make
namespaces), so that nothing else is on its interface. Each rank trains a dense
network of 4 million weights. After the first broadcast and a few steps to warm
up, the interface's counter is read, then again after some more steps, and the
difference is compared with the gradient traffic: what the compressor counts as
sent, times the hops that the collective takes. A second count, with all ranks
waiting as long as the steps took, shows what Horovod's coordination sends by
itself. It goes on all the time, and is part of the total that is compared.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5
WIDTH, LAYERS, BATCH = 1000, 4, 16


def interface_bytes():
    """Bytes sent over this namespace's only interface since it exists."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("no interface lo in /proc/net/dev")


def hops(gathered, ranks):
    """Times that a byte given away by one rank goes over the wire.

    A gather takes it to every other rank; a ring allreduce sends 2 (n - 1) / n
    of every rank's input.
    """
    return ranks - 1 if gathered else 2 * (ranks - 1) / ranks


def worker(compression, threshold, steps):
    """One rank: train, and on rank 0 print what was counted."""
    import horovod.tensorflow.keras as hvd
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras

    import hvd_fec
    from hvd_fec.callbacks import ReplicaCheck

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1 + hvd.rank())
    layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    compressor = hvd.Compression.none
    if compression == "fec":
        # The exchange whose hops are the same for all sizes of model.
        compressor = hvd_fec.FEC(threshold, exchange="allgather")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01), compression=compressor, groups=1
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(hvd.rank())
    x, y = rng.standard_normal((BATCH, WIDTH), np.float32), rng.integers(10, size=BATCH)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    check = ReplicaCheck(every=steps)  # once, in what is counted

    def train(count, *callbacks):
        model.fit(data, steps_per_epoch=count, verbose=0, callbacks=list(callbacks))

    def given_away():
        return compressor.stats.bytes_sent if compression == "fec" else 0

    def read():
        """The counter while nothing of the training is under way."""
        hvd.allreduce(np.zeros(1))
        value = interface_bytes()
        hvd.allreduce(np.zeros(1))
        return value

    train(WARM_UP, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    counted, own = read(), given_away()
    begun = time.perf_counter()
    train(steps, check)
    seconds = time.perf_counter() - begun
    counted, own = read() - counted, given_away() - own
    idle = read()
    time.sleep(seconds)
    idle = read() - idle
    dense = steps * 4 * model.count_params()
    if compression == "none":
        own = dense
    total = float(hvd.allreduce(np.float64(own), op=hvd.Sum)) * hops(
        compression == "fec", hvd.size()
    )
    if hvd.rank() == 0:
        row = {
            "compression": compression,
            "ranks": hvd.size(),
            "steps": steps,
            "ratio": dense / own,
            "gradient_mb": total / 1e6,
            "interface_mb": counted / 1e6,
            "coordination_mb": idle / 1e6,
            "weights_mb": 4 * model.count_params() / 1e6,
            "seconds": seconds,
        }
        print(json.dumps(row), flush=True)


def inside(args):
    """In the namespace: bring the interface up and run the ranks."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    launcher = shutil.which("horovodrun", path=str(Path(sys.executable).parent)) or "horovodrun"
    head = f"{'codec':8} {'steps':>6} {'ratio':>7} {'gradients':>12} {'interface':>12} {'extra':>8}"
    print(f"{head} {'of which idle':>14}")
    rows = []
    for compression in args.compression:
        command = [launcher, "-np", str(args.ranks), sys.executable, __file__, "--worker"]
        command += ["--compression", compression, "--steps", str(args.steps)]
        command += ["--threshold", str(args.threshold)]
        python_path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "PYTHONPATH": python_path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = [line for line in done.stdout.splitlines() if '{"compression"' in line]
        if done.returncode or not lines:
            raise SystemExit(f"{done.stdout}{done.stderr}"[:4000])
        row = json.loads(lines[-1][lines[-1].index("{") :])
        rows.append(row)
        extra = row["interface_mb"] / row["gradient_mb"] - 1
        idle = row["coordination_mb"] / row["gradient_mb"]
        print(
            f"{compression:8} {row['steps']:6d} {row['ratio']:7.1f} {row['gradient_mb']:9.2f} MB "
            f"{row['interface_mb']:9.2f} MB {extra:8.2%} {idle:14.2%}",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=100)
    add("--compression", nargs="+", choices=("none", "fec"), default=["none", "fec"])
    add("--threshold", type=int, default=-9, help="of fec")
    add("--json", help="also write the rows to this file")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.compression[0], args.threshold, args.steps)
    elif args.inside:
        inside(args)
    else:
        command = ["unshare", "--net"] + ["--map-root-user"] * (os.geteuid() != 0)
        sys.exit(subprocess.call([*command, sys.executable, __file__, "--inside", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
