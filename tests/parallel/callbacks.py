"""ReplicaCheck on models that agree and that do not; CompressionMetrics where people look."""

import csv
import warnings
from pathlib import Path

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorflow import keras

import hvd_fec
from hvd_fec import checkpoint
from hvd_fec.callbacks import (
    CompressionMetrics,
    CompressorCheckpoint,
    ReplicaCheck,
    ReplicaError,
)

RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1
STEPS = 12


def build(norm=False, compressor=None):
    """Ranks start from different weights: only the broadcast makes them equal."""
    keras.utils.set_random_seed(RANK)
    layers = [keras.layers.Dense(64, name="first"), keras.layers.Dense(3, name="second")]
    if norm:
        layers.insert(1, keras.layers.BatchNormalization(name="norm"))
    model = keras.Sequential([keras.layers.Input((32,)), *layers])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9),
        compression=compressor or hvd_fec.FEC(-9),
        groups=1,
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model, *callbacks, **kwargs):
    rng = np.random.default_rng(RANK)
    x, y = rng.standard_normal((8 * STEPS, 32), np.float32), rng.integers(3, size=8 * STEPS)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=8, callbacks=[broadcast, *callbacks], **{"verbose": 0, **kwargs})


class Spoil(keras.callbacks.Callback):
    """Alter one element of a variable on the last rank after ``step`` steps."""

    def __init__(self, step, variable):
        super().__init__()
        self.step, self.variable, self.done = step, variable, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if RANK == LAST and self.done == self.step:
            value = self.variable().numpy()
            value.flat[0] += 1e-3  # a last bit may be rounded away again by the next update
            self.variable().assign(value)


class Count(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


@pytest.mark.parametrize("norm", [False, True])
def test_replicas_agree(norm):
    """With batch normalization too, whose moving averages differ between ranks."""
    model = build(norm)
    fit(model, ReplicaCheck(every=1), epochs=2)


@pytest.mark.parametrize(
    "variable, name",
    [
        (lambda m: m.layers[0].kernel, "first/kernel:0"),
        (lambda m: m.layers[1].bias, "second/bias:0"),
        (lambda m: m.optimizer.variables()[-1], "second"),
    ],
    ids=["kernel", "bias", "momentum"],
)
def test_an_altered_variable_is_named_within_the_period(variable, name):
    model, count = build(), Count()
    with pytest.raises(ReplicaError) as caught:
        fit(model, Spoil(6, lambda: variable(model)), count, ReplicaCheck(every=5))
    assert count.steps == 10
    message = str(caught.value)
    assert "after 10 steps" in message
    culprit = f"rank {LAST} differs from the others" if SIZE > 2 else "rank 0 and rank 1 differ"
    line = next(line for line in message.splitlines() if name in line)
    assert line.endswith(culprit)


def test_end_of_training_is_checked():
    model = build()
    with pytest.raises(ReplicaError, match=f"after {STEPS} steps"):
        fit(model, Spoil(STEPS, lambda: model.layers[0].kernel), ReplicaCheck(every=1000))


def test_several_steps_per_execution():
    model, count = build(), Count()
    model.steps_per_execution = 4
    with pytest.raises(ReplicaError, match="after 8 steps"):
        fit(model, Spoil(1, lambda: model.layers[0].kernel), count, ReplicaCheck(every=5))


def test_process_set(even):
    """Ranks outside of the set train something else and take no part."""
    model = build()
    check = ReplicaCheck(process_set=even)
    check.set_model(model)
    model.layers[0].kernel.assign(np.full((32, 64), RANK % 2))
    for variable in model.weights[1:]:
        variable.assign(np.zeros(variable.shape))
    check.check()


def test_missing_variable_is_named():
    model = keras.Sequential([keras.layers.Dense(2, name="extra" if RANK else "same")])
    model.build((None, 3))
    check = ReplicaCheck()
    check.set_model(model)
    with pytest.raises(ReplicaError, match="extra/kernel:0"):
        check.check()


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_period_must_be_positive(every):
    with pytest.raises(ValueError, match="every must be a positive integer"):
        ReplicaCheck(every=every)


# ---- a compressor's state ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: hvd_fec.FEC(-6, exchange="allgather"),
        lambda: hvd_fec.FEC(-6, exchange="twoshot"),
        lambda: hvd_fec.Ternary(),
        lambda: hvd_fec.Ternary("stochastic"),
    ],
    ids=["fec", "twoshot", "ternary", "stochastic"],
)
def test_resumed_training_goes_on_bit_by_bit(make, tmp_path):
    """Other variables, made later in the same process, take up what the first ones left."""
    tf.config.experimental.enable_op_determinism()
    compressor = make()
    model = build(compressor=compressor)
    fit(model)
    path = tmp_path / "state.npz"
    checkpoint.save(path, compressor, RANK, SIZE)
    start = [v.numpy() for v in (*model.variables, *model.optimizer.variables())]
    fit(model, ReplicaCheck(every=4))

    def resumed(restores):
        again = make()
        twin = build(compressor=again)
        twin.optimizer.build(twin.trainable_variables)
        for variable, value in zip((*twin.variables, *twin.optimizer.variables()), start):
            variable.assign(value)
        if restores:
            checkpoint.restore(path, again, RANK, SIZE)
        fit(twin, ReplicaCheck(every=4))
        return all((a.numpy() == b.numpy()).all() for a, b in zip(twin.weights, model.weights))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert resumed(restores=True)
    assert not resumed(restores=False)


# ---- CompressorCheckpoint ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks."""
    return Path(broadcast_object(str(tmp_path), 0))


def saves(folder):
    """Steps of this rank's files."""
    return sorted(int(p.name.split("-")[1]) for p in folder.glob(f"*-rank-{RANK}-of-{SIZE}.npz"))


def at_step(step, folder, compressor=None, value=0.0):
    """A callback whose model has done so many steps and whose compressor holds a residual."""
    compressor = compressor or hvd_fec.FEC()
    residuals = {"kernel[0]": np.full(5, value + RANK, np.float32)}
    state = {"residuals": residuals if value else {}, "steps": {}, "control": []}
    compressor.load_state_dict(state)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(), "mse")
    model.optimizer.iterations.assign(step if RANK == 0 else 0)  # as before the broadcast
    callback = CompressorCheckpoint(compressor, folder)
    callback.set_model(model)
    return callback


def held(callback):
    return {key: set(value) for key, value in callback.compressor.state_dict()["residuals"].items()}


def test_training_resumed_with_keras(folder):
    """As the callback's docstring says, after the second of four epochs."""
    tf.config.experimental.enable_op_determinism()

    def train(folder, epochs, initial_epoch=0, newest=None):
        compressor = hvd_fec.FEC(-6)
        model = build(compressor=compressor)
        own = [CompressorCheckpoint(compressor, folder / "residuals")]
        if newest:
            model.load_weights(newest)
        elif RANK == 0:
            path = str(folder / "epoch-{epoch}")
            own.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
        fit(model, *own, epochs=epochs, initial_epoch=initial_epoch, shuffle=False)
        return model.get_weights()

    start = train(folder, 2)
    assert saves(folder / "residuals") == [STEPS, 2 * STEPS]
    hvd.broadcast(0, 0)  # rank 0 has saved its model
    newest = tf.train.latest_checkpoint(folder)
    assert newest.endswith("epoch-2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        resumed = train(folder, 4, 2, newest)
    assert saves(folder / "residuals") == [3 * STEPS, 4 * STEPS]
    whole = train(folder / "whole", 4)
    assert all((a == b).all() for a, b in zip(whole, resumed))
    assert not all((a == b).all() for a, b in zip(whole, start))


def test_saves_when_model_checkpoint_does(tmp_path):
    """With epochs that are no multiple of it, and several steps at once."""
    compressor = hvd_fec.FEC(-6)
    model = build(compressor=compressor)
    model.steps_per_execution = 2
    steps = {"model": [], "residuals": []}

    class Model(keras.callbacks.ModelCheckpoint):
        def _save_model(self, *args, **kwargs):
            steps["model"].append(int(self.model.optimizer.iterations))

    class Residuals(CompressorCheckpoint):
        def save(self):
            steps["residuals"].append(int(self.model.optimizer.iterations))

    fit(
        model, Residuals(compressor, tmp_path, 5), Model(str(tmp_path / "m"), save_freq=5), epochs=3
    )
    assert steps["residuals"] == steps["model"] and len(steps["model"]) == 6


def test_the_models_step_is_restored_not_the_newest(folder):
    """A kill between the residuals of step 30 and the model of step 30."""
    for step in (10, 20, 30):
        at_step(step, folder, value=step).save()
    assert saves(folder) == [20, 30]
    again = at_step(20, folder)
    assert again.restore() and held(again) == {"kernel[0]": {20.0 + RANK}}
    again.model.optimizer.iterations.assign(25)
    again.save()
    assert saves(folder) == [20, 25], "step 30 was of a past that did not happen"


def lacking(folder):
    if RANK == LAST:
        (folder / f"step-20-rank-{LAST}-of-{SIZE}.npz").unlink()


def other_number(folder):
    name = f"step-20-rank-{RANK}-of-{{}}.npz"
    (folder / name.format(SIZE)).rename(folder / name.format(SIZE + 1))


def renamed(folder):
    (folder / f"step-20-rank-{RANK}-of-{SIZE}.npz").rename(
        folder / f"step-21-rank-{RANK}-of-{SIZE}.npz"
    )


@pytest.mark.parametrize(
    "change, step, compressor, text",
    [
        (
            lacking,
            20,
            None,
            f"rank {LAST}: there is no .*step-20-rank-{LAST}-of.*; the folder has step 20 of",
        ),
        (
            other_number,
            20,
            None,
            f"no .*step-20-rank-0-of-{SIZE}.npz; the folder has step 20 of {SIZE + 1} ranks",
        ),
        (lambda folder: None, 20, hvd_fec.FEC(-7), "'threshold': -9, .* not {'threshold': -7"),
        (lambda folder: None, 20, hvd_fec.Ternary(), "compressor FEC, not Ternary"),
        (lambda folder: None, 19, None, "model is at step 19, .* folder has step 20 of"),
        (lambda folder: None, 0, None, "model is at step 0, .* folder has step 20 of"),
        (renamed, 21, None, "is of step 20, not 21"),
    ],
    ids=["lacking", "ranks", "setting", "compressor", "step", "new", "renamed"],
)
def test_what_does_not_fit_is_left_on_all_ranks_with_a_warning(
    folder, change, step, compressor, text
):
    at_step(20, folder, value=1).save()
    change(folder)
    hvd.allreduce(0)  # else one rank may look before another has changed its file
    again = at_step(step, folder, compressor)
    with pytest.warns(RuntimeWarning, match=text):
        assert not again.restore()
    assert held(again) == {}
    again.model.optimizer.iterations.assign(22)
    again.save()
    assert len(list(folder.iterdir())) <= 2 * SIZE, "nothing is left behind for good"


def test_a_changed_model_starts_clean_with_a_warning(folder):
    at_step(20, folder, hvd_fec.FEC(-6), value=1).save()
    compressor = hvd_fec.FEC(-6)
    model = build(compressor=compressor)
    model.optimizer.iterations.assign(20)
    with pytest.warns(RuntimeWarning, match=r"no residual to restore for first/kernel\[0\]"):
        fit(model, CompressorCheckpoint(compressor, folder))


def test_nothing_to_restore_is_no_surprise(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert not at_step(0, folder / "new").restore()


@pytest.mark.parametrize("blob", [b"", b"PK\3\4 and nothing more", b"\x93NUMPY"])
def test_a_torn_file_is_an_error_on_all_ranks(folder, blob):
    at_step(20, folder, value=1).save()
    if RANK == LAST:
        (folder / f"step-20-rank-{LAST}-of-{SIZE}.npz").write_bytes(blob)
    again = at_step(20, folder)
    with pytest.raises(checkpoint.CheckpointError, match=f"^rank {LAST}: .*damaged, or no file"):
        again.restore()
    assert held(again) == {}


def test_a_rank_that_cannot_write_ends_all(folder):
    if RANK == LAST:
        folder = folder / "file" / "folder"
        folder.parent.write_bytes(b"")
    with pytest.raises(OSError, match=f"^rank {LAST}: .*Not a directory"):
        at_step(20, folder, value=1).save()


def test_arguments_of_compressor_checkpoint(tmp_path):
    with pytest.raises(TypeError, match="has no state to save: give CompressorCheckpoint the hvd_"):
        CompressorCheckpoint(hvd.Compression.none, tmp_path)
    for save_freq in (0, 1.5, "batch"):
        with pytest.raises(ValueError, match="save_freq must be 'epoch' or a positive integer"):
            CompressorCheckpoint(hvd_fec.FEC(), tmp_path, save_freq)


# ---- CompressionMetrics -----------------------------------------------------------------------

SHOWN = ["ratio", "density", "sent_mb", "residual", "encode_ms", "exchange_ms", "decode_ms"]


class Logs(keras.callbacks.Callback):
    """What callbacks after CompressionMetrics see of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))


def events(folder):
    """Scalars in TensorBoard's event files, by tag: one value a step."""
    scalars = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    scalars.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor).item())
    return scalars


@pytest.mark.parametrize("make", [hvd_fec.FEC, hvd_fec.Ternary], ids=["fec", "ternary"])
def test_metrics_reach_csv_and_tensorboard(make, tmp_path):
    compressor = make()
    model, logs = build(compressor=compressor), Logs()
    metrics = CompressionMetrics(compressor, sample_every=1)
    fit(
        model,
        metrics,
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "board"),
        logs,
        epochs=2,
    )
    with open(tmp_path / "log.csv") as file:
        rows = [{name: float(row[name]) for name in SHOWN} for row in csv.DictReader(file)]
    board = events(tmp_path / "board")
    for name in SHOWN:
        np.testing.assert_allclose(board[f"epoch_{name}"], [row[name] for row in rows], rtol=1e-5)
    # every rank has the mean of all ranks here, as MetricAverageCallback left it
    same = hvd.allgather(tf.constant([[row[name] for name in SHOWN] for row in rows])).numpy()
    assert (same.reshape(SIZE, 2, -1) == same[:2]).all()

    seen, stats = logs.seen, compressor.stats
    assert len(seen) == stats.steps == 2 * STEPS
    assert sum(row["sent_mb"] for row in seen) == pytest.approx(stats.bytes_sent / 1e6)
    dense = stats.bytes_dense / 2 / STEPS
    assert all(row["ratio"] == pytest.approx(dense / 1e6 / row["sent_mb"]) for row in seen)
    density = np.mean([row["density"] for row in seen])
    assert 0 < density < 1 and density == pytest.approx(stats.density)
    for phase in ("encode", "exchange", "decode"):
        total = sum(row[f"{phase}_ms"] for row in seen)
        assert 0 < total == pytest.approx(1e3 * getattr(stats.totals(), phase))


def test_residual_is_that_of_the_store():
    compressor = hvd_fec.FEC(-6)
    model, logs = build(compressor=compressor), Logs()
    fit(model, CompressionMetrics(compressor, sample_every=1), logs)
    ((key, residual),) = compressor.residuals.items()  # the first kernel; the others are small
    tensor = compressor.stats.tensors()[key]
    assert tensor.residual_norm == pytest.approx(np.linalg.norm(residual))
    assert logs.seen[-1]["residual"] == pytest.approx(tensor.residual_norm / tensor.gradient_norm)
    assert len({row["residual"] for row in logs.seen}) == STEPS, "sampled in every step"


def test_progress_bar_and_samples_of_norms(capsys):
    compressor = hvd_fec.FEC(-6)
    model, logs = build(compressor=compressor), Logs()
    fit(model, CompressionMetrics(compressor, sample_every=5), logs, verbose=1)
    bar = capsys.readouterr().out.splitlines()[-1]
    assert all(f" - {name}: " in bar for name in SHOWN)
    values = [row["residual"] for row in logs.seen]
    assert values[:5] == values[:1] * 5 and values[5:10] == values[5:6] * 5
    assert len(set(values)) == 3 and 0 not in values


def test_table_names_the_variables():
    compressor = hvd_fec.FEC(-9)
    model = build(compressor=compressor)
    metrics = CompressionMetrics(compressor)
    assert len(metrics.table().splitlines()) == 1, "before training"
    fit(model, metrics)
    head, line = metrics.table().splitlines()
    assert head.split()[0] == "tensor"
    assert line.split()[:2] == ["first/kernel[0]", "2,048"]


def test_two_shots_count_each_tensor_once():
    compressor = hvd_fec.FEC(-9, exchange="twoshot")
    fit(build(compressor=compressor), CompressionMetrics(compressor))
    (tensor,) = compressor.stats.tensors().values()
    assert (tensor.calls, tensor.size) == (STEPS, 32 * 64)
    assert tensor.density == compressor.stats.density > 0


def test_metrics_need_a_compressor_with_statistics():
    with pytest.raises(TypeError, match="keeps no statistics: give CompressionMetrics the hvd_fec"):
        CompressionMetrics(hvd.Compression.none)
    with pytest.raises(ValueError, match="sample_every must be a positive integer, not 0"):
        CompressionMetrics(hvd_fec.FEC(), sample_every=0)
