"""A training that goes on until something stops it: see tests/test_interrupted.py.

    horovodrun -np 2 python tests/parallel/endless.py FOLDER [FAULT]

It starts from the checkpoint in FOLDER, if there is one, and writes one in every step. With a FAULT
(raise, kill or stop) that happens to rank 1 in its tenth step, kill and stop while it encodes.
"""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_fec.checkpoint
from hvd_fec.codecs import FecCodec

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2] if RANK == 1 and len(sys.argv) > 2 else None
RESIDUALS, WEIGHTS = FOLDER / f"residuals-{RANK}.npz", FOLDER / "weights.npy"
STEP = 10


class Faulty(FecCodec):
    """Encodes until it is time to ``happen``."""

    happen = None

    def encode_counting(self, x, residual=None):
        if self.happen:
            print(f"rank {RANK}: {FAULT}", flush=True)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.happen])
        return super().encode_counting(x, residual)


def main():
    compressor = hvd_fec.FEC(threshold=-5)
    compressor._codec = Faulty(-5)
    v = tf.Variable(tf.zeros([64, 48]))
    if WEIGHTS.exists():
        v.assign(np.load(WEIGHTS))
    if RESIDUALS.exists():
        hvd_fec.checkpoint.restore(RESIDUALS, compressor, RANK, SIZE)
        print(f"rank {RANK}: restored", flush=True)
    hvd.broadcast_variables([v], 0)

    @tf.function
    def step(target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((v - target) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        v.assign_sub(0.05 * tape.gradient(loss, [v])[0])
        return loss

    i = 0
    while True:
        i += 1
        if i == STEP and FAULT == "raise":
            raise ValueError("what a user's code may raise")
        compressor._codec.happen = FAULT if i == STEP else None
        last = time.monotonic()
        try:
            step(tf.random.normal([64, 48], 1.0))
        except Exception as error:
            waited, text = time.monotonic() - last, " ".join(str(error).split())
            print(f"rank {RANK}: {type(error).__name__} after {waited:.1f} s: {text}", flush=True)
            raise
        if RANK == 0:
            partial = WEIGHTS.with_suffix(".new.npy")
            np.save(partial, v.numpy())
            partial.replace(WEIGHTS)
        hvd_fec.checkpoint.save(RESIDUALS, compressor, RANK, SIZE)
        print(f"rank {RANK}: step {i}", flush=True)


if __name__ == "__main__":
    main()
