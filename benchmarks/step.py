"""Time of one gradient exchange, compressor by compressor.

    horovodrun -np 2 python benchmarks/step.py --set a --density 0.003
    benchmarks/netns.sh 1gbit -- horovodrun -np 2 python benchmarks/step.py --set a

Every step reduces fresh Gaussian gradients, made outside the clock: values that repeat would pile
up in the residuals. Residuals start as they are after many steps (see ``settle``), so that the
density is the lasting one from the first step on; the table shows the density that was measured.
All compressors run in one job, in turns, and are compared with ``none`` turn by turn.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_fec
from hvd_fec import exchange, wire
from hvd_fec.cli import sets

SETS = dict(zip("abcde", sets.SETS.values()))


class Floor(hvd_fec.FEC):
    """Exchanges a frame with nothing in it: what is left when compression is free and perfect."""

    def _build(self, ex):
        def encode(names, *arrays):
            frame = wire.pack_frame(ex.probe, [])
            self._count(names, arrays, frame.nbytes + ex.token_bytes, np.zeros((len(arrays), 2)))
            return frame

        def decode(names, gathered, token):
            frames = wire.split_frames(gathered)
            exchange.factor_of(token, exchange.mean_probe(frames), len(frames))
            return ex.cast(self._buffers.zeros(ex.sizes))

        frame = tf.ensure_shape(ex.on_host(encode, ex.tensors, tf.uint8), [None])
        gathered = exchange.gather(frame, ex.name, ex.process_set)
        return ex.on_host(decode, [gathered, ex.token], ex.dtypes, "decode")


COMPRESSORS = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "floor": Floor,
    "fec": lambda: hvd_fec.FEC(threshold=-9),
    "ternary": hvd_fec.Ternary,
    "twobit": lambda: hvd_fec.TwoBit(threshold=2.0**-9),
}


def settle(compressor, rng):
    """Give the residuals the distribution they have after many steps.

    A walk that restarts near zero whenever it leaves (-T, T) is found at r with a probability that
    falls linearly from 0 to T.
    """
    twobit = isinstance(compressor, hvd_fec.TwoBit)
    scale = np.float32(compressor.threshold if twobit else 2.0**compressor.threshold)
    for _, residual in compressor.residuals.items():
        residual[:] = rng.triangular(-scale, 0, scale, residual.size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="a", help="shapes of the gradients")
    parser.add_argument("--compressors", nargs="+", choices=COMPRESSORS, default=list(COMPRESSORS))
    parser.add_argument("--density", type=float, default=0.003, help="share of values that is sent")
    parser.add_argument("--groups", type=int, default=1, help="groups of tensors; 0: no groups")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()

    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    shapes = SETS[args.set]()
    rng = np.random.default_rng(hvd.rank())
    # With error feedback an element of independent gradients is a random walk, sent when it has
    # left (-T, T): after (T / sigma)**2 steps on average.
    sigma = np.float32(2.0**-9 * args.density**0.5)

    def gradients():
        return [tf.constant(rng.standard_normal(s, np.float32) * sigma) for s in shapes]

    def make(compressor):
        @tf.function
        def reduce(tensors):
            if args.groups:
                size = -(-len(tensors) // args.groups)
                parts = [tensors[i : i + size] for i in range(0, len(tensors), size)]
                reduced = [hvd.grouped_allreduce(p, compression=compressor) for p in parts]
                reduced = sum(reduced, [])
            else:
                reduced = [hvd.allreduce(t, compression=compressor) for t in tensors]
            return [tf.reduce_sum(t) for t in reduced]  # read, as an optimizer would

        return reduce

    compressors = {name: COMPRESSORS[name]() for name in args.compressors}
    reducers = {name: make(compressor) for name, compressor in compressors.items()}
    times = {name: [] for name in reducers}
    for step in range(-args.warmup, args.steps):
        for name, reduce in reducers.items():
            tensors = gradients()
            hvd.allreduce(tf.zeros(1), name="barrier")
            begun = time.perf_counter()
            reduce(tensors)
            elapsed = time.perf_counter() - begun
            slowest = float(hvd.allreduce(tf.constant(elapsed), op=hvd.Max, name="slowest"))
            if step >= 0:
                times[name].append(slowest)
            if step == -args.warmup and hasattr(compressors[name], "stats"):
                if hasattr(compressors[name], "threshold"):
                    settle(compressors[name], rng)
                compressors[name].stats.reset()

    dense = sum(4 * int(np.prod(s)) for s in shapes)
    rows = []
    for name, seconds in times.items():
        stats = getattr(compressors[name], "stats", None)
        sent = stats.bytes_sent / stats.steps if stats else dense / (2 if name == "fp16" else 1)
        rows.append(
            {
                "set": args.set,
                "ranks": hvd.size(),
                "groups": args.groups,
                "compressor": name,
                "milliseconds": 1e3 * statistics.median(seconds),
                "spread": [1e3 * min(seconds), 1e3 * max(seconds)],
                "bytes": sent,
                "density": stats.density if stats else 1.0,
                "faster_than": {
                    other: statistics.median(o / s for o, s in zip(times[other], seconds))
                    for other in ("none", "fp16")
                    if other in times
                },
            }
        )
    if hvd.rank() == 0:
        print(
            f"set {args.set}: {len(shapes)} tensors, {dense / 4e6:.2f} M values, "
            f"{hvd.size()} ranks, groups {args.groups}"
        )
        print(
            "compressor    ms/step  (min - max)           MB/step   density  faster than none, fp16"
        )
        for row in rows:
            faster = "".join(f"{v:9.2f}" for v in row["faster_than"].values())
            print(
                f"{row['compressor']:10} {row['milliseconds']:10.2f}  "
                f"({row['spread'][0]:.2f} - {row['spread'][1]:.2f})".ljust(46)
                + f"{row['bytes'] / 1e6:8.3f}  {row['density']:8.3%} {faster}",
                flush=True,
            )
        if args.json:
            with open(args.json, "w") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
