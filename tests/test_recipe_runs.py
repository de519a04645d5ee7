"""The recipes as a user runs them, on data that the test writes; and what a resume rests on."""

import json
import os
import subprocess
import sys
import time

import imagesets
import numpy as np
import pytest
from test_parallel import HERE, QUIET, RUN, horovodrun

from hvd_fec.cli import advise

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
psutil = pytest.importorskip("psutil")


def summary(output):
    """The result line, from rank 0 alone."""
    [line] = [line for line in output.splitlines() if '{"recipe"' in line]
    return json.loads(line[line.index("{") :])


# --- under horovodrun ---


@pytest.mark.parametrize(
    "options, ratio",
    [(["fec", "--threshold", -7], 16.3), (["ternary"], 15)],
    ids=["fec", "ternary"],
)
def test_mnist_learns(options, ratio, tmp_path):
    """On scikit-learn's digits, where uncompressed training reaches 0.90 to 0.93."""
    output = horovodrun(
        2,
        *("recipes/mnist.py", "--epochs", 10, "--compression", *options),
        *("--save-gradients", tmp_path / "gradients"),
        HVD_FEC_DATA_DIR="",
    )
    result = summary(output)
    assert result["data"] == "digits" and result["steps"] == 110
    assert result["test_accuracy"] >= 0.87
    assert result["ratio"] >= ratio
    check_gradients(tmp_path / "gradients", result)


def check_gradients(folder, result):
    """What ``hvd-fec advise`` makes of saved gradients is near what the last epochs have sent."""
    files = sorted(folder.iterdir())
    assert len(files) == 11, "16 or an epoch"
    steps = [advise.read(file) for file in files]
    assert steps[0]["dense/kernel:0"].ndim == 2
    if result["compression"] == "fec":
        before, last = (result["history"][i] for i in (-4, -1))
        dense, sent = (last[key] - before[key] for key in ("mb_dense", "mb_sent"))
        lasting = advise.lasting(steps, result["settings"]["threshold"])
        assert dense / sent / 2 < lasting.ratio < 2 * dense / sent


def test_cifar(tmp_path):
    imagesets.write_cifar(tmp_path, "cifar100", "python", per_file=96)
    output = horovodrun(
        2,
        *("recipes/cifar.py", "--dataset", "cifar100", "--data-dir", tmp_path),
        *("--compression", "fec", "--threshold", -8, "--sharding", "contiguous", "--label-sorted"),
        *("--precision", "mixed_bfloat16", "--batch-size", 16, "--epochs", 2, "--eval-steps", 2),
    )
    result = summary(output)
    assert result["data"] == "python" and result["steps"] == 6
    assert result["settings"]["model"] == "resnet20" and result["settings"]["threshold"] == -8
    assert [row["step"] for row in result["history"]] == [2, 3, 4, 6]
    assert result["ratio"] > 2 and np.isfinite(result["loss"])


RESNET50 = ("recipes/imagenet.py", "--image-size", 32, "--batch-size", 3, "--compression", "fec")


def test_imagenet_resumes_after_a_kill(tmp_path):
    """On Tiny ImageNet's layout; the tests further down have the plain tree."""
    imagesets.write_tiny(tmp_path / "data")
    command = [*RESNET50, "--data-dir", tmp_path / "data", "--checkpoint", tmp_path / "saved"]
    command += ["--checkpoint-steps", 1, "--epochs"]
    kill_when((tmp_path / "saved" / "checkpoint.npz").exists, 2, *command, 100)
    output = horovodrun(2, *command, 2)
    result = summary(output)
    assert f"resumed at step {result['first_step']} from" in output
    assert 1 <= result["first_step"] < result["steps"] == 6
    assert "18 images to train on, 4 to test on" in output
    assert result["data"] == "tree" and np.isfinite(result["loss"])


def test_resumed_training_ends_as_if_never_killed(tmp_path):
    """Killed in an epoch, at a step that nobody chose: the same weights to the last bit."""
    command = ["recipes/mnist.py", "--compression", "fec", "--threshold", -7, "--deterministic"]
    command += ["--epochs", 6]
    saving = [*command, "--checkpoint", tmp_path, "--checkpoint-steps", 3]

    def saved():
        files = (tmp_path / "residuals").glob("*-rank-1-*.npz")
        return max((int(file.name.split("-")[1]) for file in files), default=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_FEC_DATA_DIR", "")
        kill_when(lambda: saved() >= 15, 2, *saving)
        whole = summary(horovodrun(2, *command))
        output = horovodrun(2, *saving)
    resumed = summary(output)
    assert 12 <= resumed["first_step"] < resumed["steps"] == 66
    assert "checkpoint.npz, with residuals" in output and "Warning" not in output
    assert whole["first_step"] == 0 and whole["weights_sha256"] == resumed["weights_sha256"]
    assert resumed["ratio"] > 10


def kill_when(condition, ranks, *command):
    """Start a command, and once the condition holds kill its ranks, who cannot clean up then."""
    command = [RUN, "-np", str(ranks), sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, **QUIET}
    with subprocess.Popen(command, cwd=HERE.parent, env=environment, **pipes) as run:
        try:
            deadline = time.monotonic() + 240
            while not condition():
                assert run.poll() is None, run.stdout.read()[-8000:]
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            children = psutil.Process(run.pid).children(recursive=True)
            ranks = [p for p in children if len(p.cmdline()) > 1 and command[4] == p.cmdline()[1]]
            for process in ranks:
                process.kill()
            run.wait(60)
            assert len(ranks) == 2, [p.cmdline() for p in children]


def test_imagenet_records(tmp_path):
    imagesets.write_records(tmp_path)
    output = horovodrun(2, *RESNET50, "--data-dir", tmp_path, "--epochs", 1, "--limit-steps", 2)
    result = summary(output)
    assert "36 images to train on, 6 to test on" in output
    assert result["data"] == "records" and result["steps"] == 2 and np.isfinite(result["loss"])


# --- in this process ---


@pytest.fixture(scope="module")
def common():
    import common

    common.hvd.init()
    return common


def options(common, *arguments):
    parser = common.option_parser("", epochs=2, batch_size=4, lr=0.1)
    parser.add_argument("--image-size", type=int, default=24)
    return parser.parse_args(list(map(str, arguments)))


def sources(common, folder, args):
    import cifar
    import data
    import imagefiles
    import imagenet

    imagesets.write_cifar(folder, "cifar10", "binary", per_file=4)
    imagesets.write_tree(folder, per_class=4)
    dataset = data.load_cifar("cifar10", folder)[1]
    yield common.InMemory(dataset, args, cifar.augment)
    yield imagenet.ImageFiles(*imagefiles.read_tree(folder)[:2], args)


@pytest.mark.parametrize("sharding", ["stratified", "contiguous"])
def test_resumed_batches_are_the_rest_of_all(common, tmp_path, sharding):
    args = options(common, "--sharding", sharding)
    for source in sources(common, tmp_path, args):
        whole = list(source.batches(1).as_numpy_iterator())
        rest = list(source.batches(1, 2).as_numpy_iterator())
        assert len(whole) == source.steps and len(rest) == source.steps - 2
        for (images, labels), (images2, labels2) in zip(whole[2:], rest):
            np.testing.assert_array_equal(images, images2)
            np.testing.assert_array_equal(labels, labels2)
        other = list(source.batches(0).as_numpy_iterator())
        assert any((a[0] != b[0]).any() for a, b in zip(whole, other))
        tested = list(source.testing().as_numpy_iterator())
        assert sum(map(len, tested)) == len(source.test_labels) == source.test_total


def test_images_belong_to_their_labels(common, tmp_path):
    """Classes differ in colour, and neither cropping nor flipping changes it."""
    colours = np.random.default_rng(1).integers(40, 216, (1000, 1, 1, 3))[:, 0, 0]
    for source in sources(common, tmp_path, options(common)):
        for images, labels in source.batches(0).as_numpy_iterator():
            middle = images[:, 8:16, 8:16].mean(axis=(1, 2))
            assert np.abs(middle - colours[labels]).max() < 25
        means = np.concatenate(list(source.testing().as_numpy_iterator()))[:, 8:16, 8:16]
        assert np.abs(means.mean(axis=(1, 2)) - colours[source.test_labels]).max() < 25


def test_cifar_augmentation_shifts_and_flips():
    import cifar

    image = np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(1, 32, 32, 3)
    padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)))
    seen = set()
    for step in range(40):
        [moved] = cifar.augment(tf.constant(image), tf.constant([1, step])).numpy()
        found = [
            (y, x, flip)
            for flip, base in enumerate((padded, padded[:, ::-1]))
            for y in range(9)
            for x in range(9)
            if (base[y : y + 32, x : x + 32] == moved).all()
        ]
        assert found
        seen.update(found)
    assert {flip for *_, flip in seen} == {0, 1} and len({y for y, *_ in seen}) > 5


@pytest.mark.parametrize(
    "name, size, classes, weights",
    [
        ("resnet20", 32, 10, 270_000),
        ("vgg16", 32, 100, 14_800_000),
        ("resnet50", 224, 1000, 25_600_000),
        ("alexnet", 224, 1000, 61_100_000),
        ("alexnet", 64, 200, 21_000_000),
    ],
)
def test_models_have_the_published_sizes(name, size, classes, weights):
    import models

    model = getattr(models, name)((size, size, 3), classes)
    assert model.count_params() == pytest.approx(weights, rel=0.01)
    assert model.output_shape == (None, classes) and model.output.dtype == tf.float32
    keras_layers = tf.keras.layers
    assert not any(isinstance(layer, keras_layers.Softmax) for layer in model.layers)


def model_with_optimizer(policy="float32"):
    keras = tf.keras
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_checkpoint_holds_everything(common, tmp_path, policy):
    import checkpoint

    training = {"steps": 3, "lr": 0.1, "size": (1, 2)}
    model, twin = model_with_optimizer(policy), model_with_optimizer(policy)
    model.fit(np.random.rand(8, 4), np.random.rand(8, 3), verbose=0)
    saver = checkpoint.Saver(tmp_path / "new" / "folder", training)
    saver.step = 7
    assert saver.restore(model) == 0
    saver.save(model)
    assert checkpoint.Saver(tmp_path / "new" / "folder", training).restore(twin) == 7
    pairs = list(zip(checkpoint.variables(model), checkpoint.variables(twin)))
    assert len(pairs) == 6 + 4 + 1  # the model, momenta, iterations
    for a, b in pairs:
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize(
    "training, blob, message",
    [
        ({"steps": 3, "lr": 0.2}, None, "is of a training with lr 0.1, not 0.2"),
        ({"steps": 3}, None, "is of a training with lr 0.1, not None"),
        ({"steps": 3, "lr": 0.1}, b"", "damaged"),
        ({"steps": 3, "lr": 0.1}, b"PK\3\4 and nothing more", "damaged"),
    ],
)
def test_checkpoint_that_does_not_fit(common, tmp_path, training, blob, message):
    import checkpoint

    model = model_with_optimizer()
    checkpoint.Saver(tmp_path, {"steps": 3, "lr": 0.1}).save(model)
    saver = checkpoint.Saver(tmp_path, training)
    if blob is not None:
        saver.path.write_bytes(blob)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        saver.restore(model)


def test_warm_up(common):
    rate = common.WarmUp(0.1, 0.4, 10, 110)
    steps = {0: 0.1, 5: 0.25, 10: 0.4, 60: 0.2, 110: 0.0, 200: 0.0}
    for step, value in steps.items():
        assert float(rate(step)) == pytest.approx(value, abs=1e-6)
    level = common.WarmUp.from_config(common.WarmUp(0.1, 0.1, 0, None).get_config())
    assert float(level(0)) == float(level(1000)) == pytest.approx(0.1)
