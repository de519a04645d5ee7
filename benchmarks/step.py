"""Time of one gradient exchange, compressor by compressor.

    horovodrun -np 2 python benchmarks/step.py --set a --density 0.003
    benchmarks/netns.sh 1gbit -- horovodrun -np 2 python benchmarks/step.py --set a

``hvd_fec.cli.steps.measure`` says how. All compressors run in one job, in turns, and are compared
with ``none`` turn by turn.
"""

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_fec
from hvd_fec import exchange, wire
from hvd_fec.cli import sets, steps

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


COMPRESSORS = {**steps.COMPRESSORS, "floor": Floor}


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
    shapes = SETS[args.set]()
    rows = steps.measure(
        shapes,
        {name: COMPRESSORS[name]() for name in args.compressors},
        density=args.density,
        groups=args.groups,
        steps=args.steps,
        warmup=args.warmup,
    )
    job = {"set": args.set, "ranks": hvd.size(), "groups": args.groups}
    rows = [{**job, **row} for row in rows]
    dense = sum(4 * int(np.prod(s)) for s in shapes)
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
