"""What the recipes share: options, set-up, per-epoch report, result line.

A recipe defines its data and its model; everything here knows only of Horovod,
Keras and the compressors.
"""

import argparse
import json
import os
import sys
import time

# TensorFlow reads this when it is imported; its start-up notes, once per rank,
# would bury the report. A value set by the user wins.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import data
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import broadcast_object
from tensorflow import keras

import hvd_fec

# Name on the command line -> maker of the compressor from the options.
COMPRESSIONS = {
    "none": lambda args: hvd.Compression.none,
    "fp16": lambda args: hvd.Compression.fp16,
    "fec": lambda args: hvd_fec.FEC(threshold=args.threshold),
    "ternary": lambda args: hvd_fec.Ternary(
        args.rounding, args.sparsity, args.clip_sigma, args.seed
    ),
    "twobit": lambda args: hvd_fec.TwoBit(args.twobit_threshold),
}

EVALUATION_BATCH = 500
MEGA = 1e6


# --- Options ----------------------------------------------------------------


def option_parser(description, *, epochs, batch_size, lr):
    """A parser with the options of every recipe; a recipe may add its own."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--compression", choices=COMPRESSIONS, default="none", help="codec in use")
    add("--threshold", type=int, default=-7, help="fec: keep gradients from 2**THRESHOLD up")
    add(
        "--rounding",
        choices=("threshold", "stochastic"),
        default="stochastic",
        help="ternary: which values become -1, 0 or 1",
    )
    add("--sparsity", type=float, default=0.25, help="ternary, threshold: scale over peak")
    add("--clip-sigma", type=float, help="ternary, stochastic: clip at so many RMS")
    add("--twobit-threshold", type=float, default=0.5, help="twobit: send plus or minus this")
    add("--groups", type=_positive, default=1, help="groups of fused gradients")
    add("--epochs", type=_positive, default=epochs, help="passes over the data")
    add("--batch-size", type=_positive, default=batch_size, help="per rank")
    add("--lr", type=float, default=lr, help="per rank; multiplied by their number")
    add("--seed", type=int, default=1, help="for weights and shuffling")
    add(
        "--data-dir",
        default=data.default_folder(),
        help="folder with the data set (also: HVD_FEC_DATA_DIR)",
    )
    add("--limit-train", type=_positive, help="train on the first so many examples")
    add("--limit-steps", type=_positive, help="at most so many steps per epoch")
    add("--verbose", action="store_true", help="more about model and progress")
    return parser


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


# --- Set-up -----------------------------------------------------------------


def start(seed):
    """Join the other ranks, claim this rank's share of the machine, fix seeds."""
    hvd.init()
    _share_devices()
    keras.utils.set_random_seed(seed)  # Python, NumPy and TensorFlow at once
    if hvd.size() == 1:
        say("One process: nothing is exchanged, so nothing is compressed.")


def _share_devices():
    """Give each rank on this host an equal part of its cores, and one GPU.

    By default every process starts as many threads as there are cores. Ranks
    that share a host would then push each other off the cores, and as all wait
    for the slowest in every step, all would slow down.
    """
    cores = len(os.sched_getaffinity(0))  # fewer than os.cpu_count() in some containers
    threads = max(1, cores // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        own = gpus[hvd.local_rank() % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)


def say(text):
    """Print on rank 0 only."""
    if hvd.rank() == 0:
        print(text, flush=True)


def fail(text):
    """End the run on all ranks, which must all call this; rank 0 says why."""
    if hvd.rank() == 0:
        print(f"error: {text}", file=sys.stderr, flush=True)
    # The first rank to leave takes the others down, so wait until rank 0 has spoken.
    broadcast_object(None, root_rank=0)
    sys.exit(1)


def load_on_root(load):
    """Call load() -> (source, Dataset) on rank 0 and share what it returns.

    Only rank 0 looks for files or downloads: no two ranks can end up with
    different data or fight for one cache file, and other hosts need no copy.
    Fits data sets of a few hundred MB. If loading fails, all ranks end, rather
    than wait for a rank 0 that is gone.
    """
    source = problem = None
    arrays, layout = [], []
    if hvd.rank() == 0:
        try:
            source, arrays = load()
            layout = [(array.shape, array.dtype.str) for array in arrays]
        except data.DataError as error:
            problem = str(error)
    source, problem, layout = broadcast_object((source, problem, layout), root_rank=0)
    if problem:
        fail(problem)
    if hvd.rank() != 0:
        arrays = [np.empty(shape, dtype) for shape, dtype in layout]
    if hvd.size() > 1:
        arrays = [hvd.broadcast(array, 0).numpy() for array in arrays]
    return source, data.Dataset(*arrays)


# --- Training ---------------------------------------------------------------


def training_batches(images, labels, args):
    """This rank's batches of all epochs, and the number of steps per epoch.

    The order is fixed beforehand by the seed alone; TensorFlow only looks up
    what the indices name.
    """
    examples, batch, rank, size = len(labels), args.batch_size, hvd.rank(), hvd.size()
    steps = examples // (batch * size)
    if not steps:
        fail(f"{examples} training examples: too few for batches of {batch} on {size} rank(s)")
    steps = min(steps, args.limit_steps or steps)
    order = np.concatenate(
        [
            data.shard(examples, batch, steps, rank, size, args.seed, epoch)
            for epoch in range(args.epochs)
        ]
    )
    images, labels = tf.constant(images), tf.constant(labels)
    batches = (
        tf.data.Dataset.from_tensor_slices(order)
        .map(lambda batch: (tf.gather(images, batch), tf.gather(labels, batch)))
        .prefetch(2)
    )
    return batches, steps


def train(model, optimizer, loss, dataset, args, *, recipe, source):
    """Fit the model on all ranks, report every epoch, print the result line."""
    compressor = COMPRESSIONS[args.compression](args)
    batches, steps = training_batches(dataset.train_images, dataset.train_labels, args)

    model.compile(
        hvd.DistributedOptimizer(optimizer, compression=compressor, groups=args.groups),
        loss,
    )
    report = EpochReport(compressor, dataset.test_images, dataset.test_labels)
    model.fit(
        batches,
        epochs=args.epochs,
        steps_per_epoch=steps,
        verbose=_keras_verbosity(args),
        callbacks=[
            # All ranks must start from one set of weights, and stay there.
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            # Keras would add its bar last, but it has to end its line before the report.
            keras.callbacks.ProgbarLogger("steps"),
            report,
        ],
    )
    result = {
        "recipe": recipe,
        "compression": args.compression,
        "settings": {
            "batch_size": args.batch_size,
            "lr": args.lr,
            "groups": args.groups,
            # Horovod's own compressors have no settings.
            **(compressor.get_config() if hasattr(compressor, "get_config") else {}),
        },
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "steps": args.epochs * steps,
        **report.result(),
        "data": source,
        "seed": args.seed,
    }
    say(json.dumps(result))
    return result


def _keras_verbosity(args):
    """A progress bar on rank 0's terminal; in a log only lines, and if asked."""
    if hvd.rank() != 0:
        return 0
    return 1 if sys.stdout.isatty() else 2 if args.verbose else 0


def traffic(compressor, variables, steps):
    """Bytes one rank gave away in `steps` steps: (uncompressed, as sent).

    This counts gradients as handed to Horovod, whatever route (ring, tree) it
    then chooses. Horovod's own compressors keep no statistics, but all they
    change is the type of the elements.
    """
    if hvd.size() == 1:
        return 0, 0
    if hasattr(compressor, "stats"):
        return compressor.stats.bytes_dense, compressor.stats.bytes_sent

    def sent_as(dtype):
        return compressor.compress(tf.zeros([], dtype))[0].dtype

    sizes = [(variable.shape.num_elements(), variable.dtype) for variable in variables]
    dense = sum(count * dtype.size for count, dtype in sizes)
    sent = sum(count * sent_as(dtype).size for count, dtype in sizes)
    return steps * dense, steps * sent


def ratio(dense, sent):
    """How many times smaller the traffic got; 1 if there was none."""
    return dense / sent if sent else 1.0


def accuracy(model, images, labels):
    """Accuracy over the whole set, of which each rank tests its share.

    Correct answers are counted and the counts summed, so shares of unequal size
    do not matter and the result is exact.
    """
    own = slice(hvd.rank(), None, hvd.size())
    guesses = model.predict(images[own], batch_size=EVALUATION_BATCH, verbose=0)
    correct = np.count_nonzero(guesses.argmax(axis=-1) == labels[own])
    return float(hvd.allreduce(np.int64(correct), op=hvd.Sum)) / len(labels)


class EpochReport(keras.callbacks.Callback):
    """Tests the model after every epoch and prints a line on rank 0.

    Seconds are those of training: testing and loading the data are not in them.
    """

    def __init__(self, compressor, test_images, test_labels):
        super().__init__()
        self._compressor = compressor
        self._test = test_images, test_labels
        self._seconds = 0.0
        self._dense = self._sent = 0
        self._loss = self._accuracy = None

    def on_epoch_begin(self, epoch, logs=None):
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self._begun
        self._seconds += seconds
        # Equal numbers of steps on all ranks make the mean of means the mean.
        self._loss = float(hvd.allreduce(np.float64(logs["loss"])))
        self._accuracy = accuracy(self.model, *self._test)
        steps = (epoch + 1) * self.params["steps"]
        dense, sent = traffic(self._compressor, self.model.trainable_variables, steps)
        epoch_dense, epoch_sent = dense - self._dense, sent - self._sent
        self._dense, self._sent = dense, sent
        say(
            f"epoch {epoch + 1}/{self.params['epochs']}"
            f"  loss {self._loss:.4f}"
            f"  test accuracy {self._accuracy:.4f}"
            f"  ratio {ratio(epoch_dense, epoch_sent):.2f}"
            f"  sent {epoch_sent / MEGA:.2f} MB"
            f"  {seconds:.1f} s"
        )

    def result(self):
        """The figures of the whole run, for the result line."""
        return {
            "test_accuracy": self._accuracy,
            "loss": self._loss,
            "ratio": ratio(self._dense, self._sent),
            "mb_sent": self._sent / MEGA,
            "mb_dense": self._dense / MEGA,
            "seconds": round(self._seconds, 3),
        }
