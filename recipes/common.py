"""What the recipes share: options, set-up, per-epoch report, result line.

A recipe defines its data and its model; everything here knows only of Horovod,
Keras and the compressors.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod

# TensorFlow reads this when it is imported; its start-up notes, once per rank,
# would bury the report. A value set by the user wins.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import checkpoint
import data
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import broadcast_object, broadcast_variables
from tensorflow import keras

import hvd_fec
from hvd_fec import sharding
from hvd_fec.callbacks import ReplicaCheck

# Name on the command line -> maker of the compressor from the options.
COMPRESSIONS = {
    "none": lambda args: hvd.Compression.none,
    "fp16": lambda args: hvd.Compression.fp16,
    "fec": lambda args: hvd_fec.FEC(
        args.threshold,
        ratio=args.ratio,
        exchange=args.exchange,
        warmup_steps=args.ratio_warmup_steps,
        momentum=MOMENTUM if args.momentum_correction else 0.0,
    ),
    "ternary": lambda args: hvd_fec.Ternary(
        args.rounding, args.sparsity, args.clip_sigma, args.seed
    ),
    "twobit": lambda args: hvd_fec.TwoBit(args.twobit_threshold),
}

EVALUATION_BATCH = 500
REPLICA_CHECK = 100  # steps between checks that all ranks have the same model
MOMENTUM = 0.9
LOSS_SCALE = 2**10  # Keras starts at 2**15, far above what the thresholds are meant for
TERMINAL_SECONDS, LOG_SECONDS = 0.5, 10.0  # between signs of progress
SAVED_STEPS = 16  # batches differ: by how much takes some to see
MEGA = 1e6


# --- Options ----------------------------------------------------------------


def option_parser(description, *, epochs, batch_size, lr, warmup_epochs=0):
    """A parser with the options of every recipe; a recipe may add its own."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--compression", choices=COMPRESSIONS, default="none", help="codec in use")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--threshold", type=float, help="fec: keep gradients from 2**THRESHOLD up")
    amount.add_argument("--ratio", type=float, help="fec: send so many times fewer bytes")
    add(
        "--ratio-warmup-steps",
        type=int,
        default=0,
        help="fec, with --ratio: steps in which the ratio grows to it",
    )
    add(
        "--momentum-correction",
        action="store_true",
        help="fec: accumulate momentum before values are selected, not in the optimizer",
    )
    add(
        "--exchange",
        choices=("auto", "allgather", "twoshot"),
        default="auto",
        help="fec: how payloads reach all ranks",
    )
    add(
        "--rounding",
        choices=("threshold", "stochastic"),
        default="threshold",
        help="ternary: which values become -1, 0 or 1",
    )
    add("--sparsity", type=float, default=0.25, help="ternary, threshold: scale over peak")
    add("--clip-sigma", type=float, help="ternary, stochastic: clip at so many RMS")
    add("--twobit-threshold", type=float, default=0.5, help="twobit: send plus or minus this")
    add("--groups", type=_positive, default=1, help="groups of fused gradients")
    add("--epochs", type=_positive, default=epochs, help="passes over the data")
    add("--batch-size", type=_positive, default=batch_size, help="per rank")
    add("--lr", type=float, default=lr, help="per rank; multiplied by their number")
    add(
        "--warmup-epochs",
        type=float,
        default=warmup_epochs,
        help="in which the rate grows from that of one rank to that of all",
    )
    add("--seed", type=int, default=1, help="for weights and shuffling")
    add(
        "--sharding",
        choices=data.SHARDINGS,
        default=data.SHARDINGS[0],
        help="how the ranks share the training data out",
    )
    add(
        "--label-sorted",
        action="store_true",
        help="take the training data ordered by label, as class directories are",
    )
    add(
        "--precision",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        default="float32",
        help="Keras's policy; with mixed_float16 thresholds apply to gradients "
        f"times the loss scale, at first {LOSS_SCALE}",
    )
    add(
        "--data-dir",
        default=data.default_folder(),
        help="folder with the data set (also: HVD_FEC_DATA_DIR)",
    )
    add("--limit-train", type=_positive, help="train on so many examples only")
    add("--limit-steps", type=_positive, help="at most so many steps per epoch")
    add("--eval-steps", type=_positive, help="test so often; always after an epoch")
    add("--checkpoint", metavar="DIR", help="save the training there, and resume what is there")
    add("--checkpoint-steps", type=_positive, help="save so often; always after an epoch")
    add(
        "--deterministic",
        action="store_true",
        help="the same weights from every run, to the last bit; operations may be slower",
    )
    add(
        "--save-gradients",
        metavar="DIR",
        help=f"at the end write rank 0's gradients of {SAVED_STEPS} steps here, for hvd-fec advise",
    )
    add("--verbose", action="store_true", help="more about model and progress")
    return parser


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


# --- Set-up -----------------------------------------------------------------


def start(args):
    """Join the other ranks, claim this rank's share of the machine, fix seeds and precision."""
    hvd.init()
    _share_devices()
    tf.get_logger().setLevel("ERROR")  # Keras would warn that tests take longer than steps
    keras.utils.set_random_seed(args.seed)  # Python, NumPy and TensorFlow at once
    if args.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.mixed_precision.set_global_policy(args.precision)
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


# --- Data -------------------------------------------------------------------


class Source(ABC):
    """What a recipe trains and tests on. A subclass says how examples become tensors.

    `labels` and `test_labels` are those of all examples, `features` [n, f] are
    statistics of the training examples to balance in shards, or None. `steps`
    per epoch are the same on all ranks; `test_labels` become this rank's share.
    """

    def __init__(self, labels, features, test_labels, args):
        self.labels, self.features, self.args = labels, features, args
        batch, rank, size = args.batch_size, hvd.rank(), hvd.size()
        self.steps = len(labels) // size // batch
        if not self.steps:
            found = f"{len(labels)} training examples"
            fail(f"{found}: too few for batches of {batch} on {size} rank(s)")
        self.steps = min(self.steps, args.limit_steps or self.steps)
        self.test_total = len(test_labels)
        self.test_indices = np.arange(rank, self.test_total, size)
        self.test_labels = test_labels[self.test_indices]

    def batches(self, epoch, first=0):
        """This rank's batches of an epoch from step `first` on, as a tf.data.Dataset.

        Seed and epoch fix the order and the augmentation, so a resumed run sees
        what the run that was cut off would have seen.
        """
        args, rank = self.args, hvd.rank()
        order = data.shard(
            self.labels,
            self.features,
            args.sharding,
            batch=args.batch_size,
            rank=rank,
            size=hvd.size(),
            seed=args.seed,
            epoch=epoch,
        )
        [seed] = np.random.SeedSequence([args.seed, epoch, rank]).generate_state(1)
        batches = self.training(order[: self.steps], np.int32(seed >> 1), first)
        # All ranks must do the same number of steps: anything else ends here, with an error.
        checked = batches.apply(tf.data.experimental.assert_cardinality(self.steps - first))
        return checked.prefetch(2)

    @abstractmethod
    def training(self, order, seed, first):
        """Batches (images, labels) of the examples order[first:], [steps, batch], augmented."""

    @abstractmethod
    def testing(self):
        """Batches of images, those of `test_indices`."""


class InMemory(Source):
    """A data.Dataset, which all ranks hold."""

    def __init__(self, dataset, args, augment=None):
        """`augment` takes uint8 images [batch, ...] and a seed, int32 [2], to other images."""
        dataset = dataset.limited(args.limit_train)
        if args.label_sorted:
            dataset = dataset.sorted_by_label()
        self._images = tf.constant(dataset.train_images)
        self._labels = tf.constant(dataset.train_labels)
        self._augment = augment
        # From one rank, as all must deal alike, and sums may differ in a last bit
        # between processors.
        features = sharding.image_features(dataset.train_images) if hvd.rank() == 0 else None
        if hvd.size() > 1:
            features = np.zeros((len(self._labels), 2)) if features is None else features
            features = hvd.broadcast(features, 0).numpy()
        super().__init__(dataset.train_labels, features, dataset.test_labels, args)
        self._test_images = dataset.test_images[self.test_indices]

    def training(self, order, seed, first):
        def look_up(step, batch):
            images, labels = tf.gather(self._images, batch), tf.gather(self._labels, batch)
            if self._augment:
                images = self._augment(images, tf.stack([seed, tf.cast(step, tf.int32)]))
            return images, labels

        return tf.data.Dataset.from_tensor_slices(order[first:]).enumerate(first).map(look_up)

    def testing(self):
        return tf.data.Dataset.from_tensor_slices(self._test_images).batch(EVALUATION_BATCH)


# --- Training ---------------------------------------------------------------


@keras.saving.register_keras_serializable("hvd_fec_recipes")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """From `base` to `peak` in a line, and then down a cosine to 0 at step `end` (None: level).

    N ranks average N batches, so an epoch has N times fewer but less noisy
    steps; a rate N times higher lets it cover the same ground (Goyal et al.
    2017, arXiv 1706.02677). Right from the start it would be too high.
    """

    def __init__(self, base, peak, warm, end):
        super().__init__()
        self._config = {"base": base, "peak": peak, "warm": warm, "end": end}

    def get_config(self):
        return self._config

    def __call__(self, step):
        base, peak, warm, end = self._config.values()
        step = tf.cast(step, tf.float32)
        line = base + (peak - base) * step / max(warm, 1)
        level = tf.constant(peak, tf.float32)
        if end is not None:
            level *= (1 + tf.cos(np.pi * tf.clip_by_value((step - warm) / (end - warm), 0, 1))) / 2
        return tf.where(step < warm, line, level)


def sgd(args, steps, *, decay=True, **settings):
    """SGD with momentum, its rate as the options say; `steps` per epoch.

    SGD, because its step is linear in the gradient: what a compressor loses or
    holds back shows as it is, whereas Adam divides it by its own running scale.
    """
    end = args.epochs * steps if decay else None
    warm = args.warmup_epochs * steps
    if end is not None:
        warm = min(warm, end - 1)
    rate = WarmUp(args.lr, args.lr * hvd.size(), warm, end)
    corrected = args.compression == "fec" and args.momentum_correction
    return keras.optimizers.SGD(rate, momentum=0.0 if corrected else MOMENTUM, **settings)


def train(model, optimizer, source, args, *, recipe, settings=None, origin):
    """Fit the model on all ranks, report, print the result line and return it.

    The model gives logits. `settings` are the recipe's own, for the result line
    and to tell whether a checkpoint is of the same training; `origin` says where
    the data came from.
    """
    compressor = COMPRESSIONS[args.compression](args)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compressor, groups=args.groups)
    if args.precision == "mixed_float16":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=LOSS_SCALE)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)

    settings = {
        "batch_size": args.batch_size,
        "lr": args.lr,
        "precision": args.precision,
        "sharding": args.sharding,
        "label_sorted": args.label_sorted,
        **(settings or {}),
    }
    done = 0
    callbacks = [ReplicaCheck(REPLICA_CHECK)]
    report = Report(compressor, source, args)
    report.set_model(model)  # if all is done already, Keras will not
    callbacks.append(report)
    if args.checkpoint:
        same = {"recipe": recipe, "ranks": hvd.size(), "seed": args.seed, "steps": source.steps}
        saver = checkpoint.Saver(
            args.checkpoint,
            {**same, **settings},
            args.checkpoint_steps,
            # Horovod's own compressors hold nothing back.
            compressor if hasattr(compressor, "state_dict") else None,
        )
        callbacks.append(saver)
        done = _resume(saver, model)
        saver.step = report.step = report.first = done
    # All ranks must start from one set of weights; from then on gradients are all they exchange.
    broadcast_variables(checkpoint.variables(model), 0)
    for epoch in range(done // source.steps, args.epochs):
        first = max(0, done - epoch * source.steps)
        model.fit(
            source.batches(epoch, first),
            initial_epoch=epoch,
            epochs=epoch + 1,
            verbose=0,
            callbacks=callbacks,
        )
    result = {
        "recipe": recipe,
        "compression": args.compression,
        "settings": {
            **settings,
            "groups": args.groups,
            # Horovod's own compressors have no settings.
            **(compressor.get_config() if hasattr(compressor, "get_config") else {}),
        },
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "steps": args.epochs * source.steps,
        **report.result(),
        "weights_sha256": sha256(model),
        "data": origin,
        "seed": args.seed,
    }
    say(json.dumps(result))
    if args.save_gradients:
        save_gradients(args.save_gradients, model, source.batches(args.epochs))
    return result


def save_gradients(folder, model, batches):
    """Write rank 0's gradients, as a compressor would get them: an .npz for each of some steps."""
    if hvd.rank() == 0:
        os.makedirs(folder, exist_ok=True)
        variables = model.trainable_variables
        for step, (images, labels) in enumerate(batches.take(SAVED_STEPS)):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(images, labels, model(images, training=True))
                if hasattr(model.optimizer, "get_scaled_loss"):
                    loss = model.optimizer.get_scaled_loss(loss)
            gradients = zip(variables, tape.gradient(loss, variables))
            path = os.path.join(folder, f"step-{step:02}.npz")
            np.savez(path, **{v.name: gradient.numpy() for v, gradient in gradients})
        say(f"gradients are in {folder}")
    broadcast_object(None, root_rank=0)  # a rank that leaves takes the others down


def _resume(saver, model):
    """Steps that the checkpoint in the folder has behind it; 0 if there is none."""
    done = problem = None
    if hvd.rank() == 0:
        try:
            done = saver.restore(model)
        except checkpoint.CheckpointError as error:
            problem = str(error)
    done, problem = broadcast_object((done, problem), root_rank=0)
    if problem:
        fail(problem)
    try:
        restored = saver.restore_residuals(model)
    except checkpoint.CheckpointError as error:
        fail(error)
    if done:
        say(f"resumed at step {done} from {saver.path}{', with residuals' * restored}")
    return done


def sha256(model):
    """A hash of all weights: two runs that print the same have trained the same model."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return digest.hexdigest()


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


def accuracy(model, source):
    """Accuracy over the whole test set, of which each rank tests its share.

    Correct answers are counted and the counts summed, so shares of unequal size
    do not matter and the result is exact.
    """
    correct = 0
    if len(source.test_labels):
        guesses = model.predict(source.testing(), verbose=0)
        correct = np.count_nonzero(guesses.argmax(axis=-1) == source.test_labels)
    return float(hvd.allreduce(np.int64(correct), op=hvd.Sum)) / source.test_total


class Report(keras.callbacks.Callback):
    """Tests the model after every epoch and as often as asked, and prints a line on rank 0.

    Seconds are those of the training steps: tests, checks and checkpoints are
    not in them. After a resume all figures are those since then.
    """

    def __init__(self, compressor, source, args):
        super().__init__()
        self._compressor, self._source, self._args = compressor, source, args
        self.step = self.first = 0  # since the training began; where this run began
        self._step_seconds = []
        self._history = []
        self._shown = time.perf_counter()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._summed = self._counted = 0.0  # losses, of this epoch and already reported

    def on_train_batch_begin(self, batch, logs=None):
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        self._step_seconds.append(now - self._begun)
        self.step += 1
        self._batches, self._mean = batch + 1, logs["loss"]
        end_of_epoch = self.step % self._source.steps == 0
        if end_of_epoch or self._args.eval_steps and self.step % self._args.eval_steps == 0:
            self._test()
        else:
            self._show_progress(now)

    def _test(self):
        # Keras gives the mean over the epoch so far; what is new in it is wanted.
        total = self._mean * self._batches
        loss = (total - self._summed) / (self._batches - self._counted)
        self._summed, self._counted = total, self._batches
        checkpoint.average_statistics(self.model)
        dense, sent = traffic(
            self._compressor, self.model.trainable_variables, self.step - self.first
        )
        before = self._history[-1] if self._history else {"mb_dense": 0, "mb_sent": 0, "seconds": 0}
        row = {
            "step": self.step,
            # Equal numbers of steps on all ranks make the mean of means the mean.
            "loss": float(hvd.allreduce(np.float64(loss))),
            "test_accuracy": accuracy(self.model, self._source),
            "mb_sent": sent / MEGA,
            "mb_dense": dense / MEGA,
            "seconds": round(sum(self._step_seconds), 3),
        }
        self._history.append(row)
        new = {key: row[key] - before[key] for key in before}
        self._end_line()
        say(
            f"epoch {self._epoch + 1}/{self._args.epochs}"
            f"  step {self.step}"
            f"  loss {row['loss']:.4f}"
            f"  test accuracy {row['test_accuracy']:.4f}"
            f"  ratio {ratio(new['mb_dense'], new['mb_sent']):.2f}"
            f"  sent {new['mb_sent']:.2f} MB"
            f"  {new['seconds']:.1f} s"
        )

    def _show_progress(self, now):
        """One line that is written over on a terminal; in a log, lines now and then, if asked."""
        terminal = sys.stdout.isatty()
        if hvd.rank() != 0 or not (terminal or self._args.verbose):
            return
        if now - self._shown > (TERMINAL_SECONDS if terminal else LOG_SECONDS):
            self._shown = now
            text = (
                f"epoch {self._epoch + 1}/{self._args.epochs}"
                f"  step {self.step}/{self._args.epochs * self._source.steps}"
                f"  loss {self._mean:.4f}  {1e3 * self._step_seconds[-1]:.0f} ms/step"
            )
            print(text, end="\r" if terminal else "\n", flush=True)

    def _end_line(self):
        if hvd.rank() == 0 and sys.stdout.isatty():
            print(end="\x1b[2K")  # erase the line of progress

    def result(self):
        """The figures of the whole run, for the result line."""
        if not self._history:  # resumed when all was done
            self._history.append(
                {
                    "step": self.step,
                    "loss": None,
                    "test_accuracy": accuracy(self.model, self._source),
                    "mb_sent": 0.0,
                    "mb_dense": 0.0,
                    "seconds": 0.0,
                }
            )
        last = dict(self._history[-1])
        del last["step"]
        return {
            **last,
            "first_step": self.first,
            "ratio": ratio(last["mb_dense"], last["mb_sent"]),
            "step_ms": round(1e3 * float(np.median(self._step_seconds or [0.0])), 3),
            "history": self._history,
        }
