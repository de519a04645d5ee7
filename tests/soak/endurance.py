"""Trains on the digits of scikit-learn for many steps; every rank prints what it uses on the way.

horovodrun -np 2 python tests/soak/endurance.py none|fec|ternary STEPS
"""

import json
import sys

import horovod.tensorflow as hvd
import numpy as np
import psutil
import tensorflow as tf
from sklearn.datasets import load_digits

import hvd_fec

SAMPLES = 20

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
RANK, SIZE = hvd.rank(), hvd.size()
KIND, STEPS = sys.argv[1], int(sys.argv[2])
COMPRESSION = {
    "none": lambda: hvd.Compression.none,
    "fec": lambda: hvd_fec.FEC(threshold=-7, min_size=1),
    "ternary": lambda: hvd_fec.Ternary(min_size=1),
}[KIND]()


def main():
    tf.keras.utils.set_random_seed(1)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(64),
            tf.keras.layers.Dense(32, "relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = tf.Variable(0.0)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images))
        tape = hvd.DistributedGradientTape(tape, compression=COMPRESSION, groups=1)
        for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
            v.assign_sub(rate * g)

    train, rng, me = 1400, np.random.default_rng([7, RANK]), psutil.Process()
    for i in range(STEPS):
        rate.assign(0.1 * (1 - i / STEPS))
        batch = rng.integers(0, train, 16)
        step(tf.constant(x[batch]), tf.constant(y[batch]))
        if (i + 1) % (STEPS // SAMPLES) == 0:
            used = {"step": i + 1, "rss": me.memory_info().rss, "fds": me.num_fds()}
            print(
                "USED", json.dumps({"rank": RANK, **used, "threads": me.num_threads()}), flush=True
            )
    right = np.argmax(model(x[train:]), axis=1) == y[train:]
    print("USED", json.dumps({"rank": RANK, "accuracy": float(right.mean())}), flush=True)


if __name__ == "__main__":
    main()
