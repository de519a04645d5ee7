"""Reading CIFAR, directory trees, Tiny ImageNet and TFRecords, right and damaged."""

import os
import pickle
from pathlib import Path

import data
import imagefiles
import imagesets
import numpy as np
import pytest

# --- CIFAR ---


@pytest.mark.parametrize("own_folder", [False, True])
@pytest.mark.parametrize("kind, form", data.CIFAR_FILES)
def test_read_cifar(tmp_path, kind, form, own_folder):
    folder = tmp_path / kind if own_folder else tmp_path
    written = imagesets.write_cifar(folder, kind, form)
    source, dataset = data.load_cifar(kind, tmp_path)
    assert source == form
    for read, array in zip(dataset, written):
        assert read.dtype == np.uint8
        np.testing.assert_array_equal(read, array)


def test_cifar_folder_itself(tmp_path):
    imagesets.write_cifar(tmp_path, "cifar10", "binary")
    assert data.load_cifar("cifar10", tmp_path / "cifar-10-batches-bin")[0] == "binary"


def test_real_cifar():
    folder = os.environ.get("HVD_FEC_DATA_DIR")
    try:
        _, dataset = data.load_cifar("cifar10", folder or "nowhere")
    except data.DataError:
        pytest.skip("HVD_FEC_DATA_DIR has no cifar10")
    assert dataset.train_images.shape[1:] == (32, 32, 3)
    # Photographs: neighbours are alike, in every direction and colour, or the planes are mixed up.
    pixels = dataset.train_images[:500].astype(float)
    for axis in (1, 2, 3):
        step = np.abs(np.diff(pixels, axis=axis)).mean()
        assert step < 0.5 * pixels.std(), axis
    assert set(dataset.train_labels) == set(dataset.test_labels) == set(range(10))


@pytest.mark.parametrize("folder, text", [("absent", "no such folder"), ("", "has neither")])
def test_no_cifar(tmp_path, folder, text):
    with pytest.raises(data.DataError, match=text):
        data.load_cifar("cifar10", tmp_path / folder)


ROWS = np.zeros((2, 3072), np.uint8)


class Calls:
    def __reduce__(self):
        return os.system, ("echo this must not run > ran",)


class Evals:
    def __reduce__(self):
        return eval, ("open('ran', 'w')",)


BAD_BATCHES = {
    "empty": (b"", "not a cifar10 batch"),
    "cut": (imagesets.python2_pickle(ROWS, [1, 2])[:-100], "not a cifar10 batch"),
    "no labels": (pickle.dumps({b"data": ROWS}, protocol=2), "not a cifar10 batch"),
    "cifar100": (imagesets.python2_pickle(ROWS, [1, 2], b"fine_labels"), "not a cifar10 batch"),
    "label": (imagesets.python2_pickle(ROWS, [1, 10]), "label 10, expected 0 to 9"),
    "negative": (imagesets.python2_pickle(ROWS, [1, -1]), "label -1, expected 0 to 9"),
    "count": (imagesets.python2_pickle(ROWS, [1]), "2 images, but labels of shape"),
    "width": (imagesets.python2_pickle(ROWS[:, 1:], [1, 2]), "data is uint8 of shape"),
    "floats": (pickle.dumps({b"data": ROWS.astype(float)}, 2), "not a cifar10 batch"),
    "system": (pickle.dumps(Calls(), 2), "asks for .*system, which no CIFAR batch does"),
    "eval": (pickle.dumps(Evals(), 2), "asks for .*eval, which no CIFAR batch does"),
    "objects": (pickle.dumps({b"data": np.array([Evals()])}, 2), "asks for .*eval"),
}


@pytest.mark.parametrize("blob, message", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_bad_python_batch(tmp_path, monkeypatch, blob, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(blob)
    with pytest.raises(data.DataError, match=message) as caught:
        data.read_cifar_pickle("cifar10", path)
    assert str(caught.value).startswith(f"{path}: ")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("blob", [b"", bytes(3072), bytes(3073 * 2 + 1)])
def test_bad_binary_batch(tmp_path, blob):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(blob)
    with pytest.raises(data.DataError, match="not whole records of 3073"):
        data.read_cifar_binary("cifar10", path)


# --- trees ---


def test_read_tree(tmp_path):
    pytest.importorskip("tensorflow")
    imagesets.write_tree(tmp_path, per_class=3)
    train, test, names = imagefiles.read_tree(tmp_path)
    assert names == imagesets.CLASS_NAMES
    np.testing.assert_array_equal(train.labels, np.repeat([0, 1, 2], 3))
    np.testing.assert_array_equal(test.labels, np.repeat([0, 1, 2], 4))
    for i, path in enumerate(train.paths):
        assert names[train.labels[i]] in path
        assert train.read(i) == Path(path).read_bytes()


def test_read_tiny(tmp_path):
    pytest.importorskip("tensorflow")
    labels = imagesets.write_tiny(tmp_path)
    train, test, names = imagefiles.read_tree(tmp_path)
    assert names == imagesets.CLASS_NAMES
    np.testing.assert_array_equal(train.labels, np.repeat([0, 1, 2], 6))
    np.testing.assert_array_equal(test.labels, labels)
    assert [Path(path).name for path in test.paths] == [f"val_{i}.JPEG" for i in range(4)]


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    "files, annotations, message",
    [
        ([], None, "train"),
        (["train/a/notes.txt"], None, "no images"),
        (["train/a/1.jpg"], None, "val"),
        (["train/a/1.jpg", "val/b/1.jpg"], None, "different classes: a, b"),
        (["train/a/1.jpg", "val/images/1.jpg"], "1.jpg\tb\t0\n", "txt:1: class 'b'"),
        (["train/a/1.jpg"], "2.jpg\ta\t0\n", "2.jpg, which is no file"),
        (["train/a/1.jpg"], "", "no image, which is no file"),
    ],
)
def test_bad_tree(tmp_path, files, annotations, message):
    touch(*(tmp_path / file for file in files))
    if annotations is not None:
        touch(tmp_path / "val" / imagefiles.TINY_ANNOTATIONS)
        (tmp_path / "val" / imagefiles.TINY_ANNOTATIONS).write_text(annotations)
    with pytest.raises(data.DataError, match=message):
        imagefiles.read_tree(tmp_path)


# --- TFRecords ---


def test_index_is_what_tensorflow_reads(tmp_path):
    tf = pytest.importorskip("tensorflow")
    imagesets.write_records(tmp_path)
    train, test = imagefiles.find_records(tmp_path)
    assert (len(train), len(test)) == (3, 1)
    images = imagefiles.index_records(train)
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    i = -1
    for i, record in enumerate(tf.data.TFRecordDataset(train)):
        wanted = tf.io.parse_single_example(record, features)
        assert images.read(i) == wanted["image/encoded"].numpy()
        assert images.labels[i] == wanted["image/class/label"].numpy()
    assert i + 1 == len(images.labels) == 36


def test_unpacked_labels_and_other_fields(tmp_path):
    """Any writer of protocol buffers will do: this one puts integers one by one."""

    def message(number, blob):
        return bytes([number << 3 | 2, len(blob)]) + blob

    def entry(key, feature):
        return message(1, message(1, key) + message(2, feature))

    label = entry(b"image/class/label", message(3, b"\x08\x96\x01\x08\x02"))
    image = entry(b"image/encoded", message(1, message(1, b"picture")))
    other = b"\x11" + bytes(8) + b"\x1d" + bytes(4) + b"\x20\x81\x01"
    blob = message(1, label + image) + other
    path = tmp_path / "train-0"
    path.write_bytes(len(blob).to_bytes(8, "little") + bytes(4) + blob + bytes(4))
    images = imagefiles.index_records([path])
    assert images.read(0) == b"picture"
    assert images.labels[0] == 150


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("records")
    imagesets.write_records(folder, counts=(2,), size=8)
    return (folder / "train-00000-of-00001").read_bytes()


def test_damaged_records(tmp_path, record):
    """No damage makes the index point out of the file, or raises anything but DataError."""
    path = tmp_path / "train-0"
    rng = np.random.default_rng(0)
    blobs = [record[:cut] for cut in range(0, len(record), 7)]
    for _ in range(300):
        blob = bytearray(record)
        for at in rng.integers(len(blob), size=3):
            blob[at] = rng.integers(256)
        blobs.append(bytes(blob))
    for blob in blobs:
        path.write_bytes(blob)
        try:
            images = imagefiles.index_records([path])
        except data.DataError as error:
            assert str(error).startswith(f"{path}: ")
            continue
        assert (images.offset + images.length <= len(blob)).all() and (images.length >= 0).all()


def test_labels_beyond_the_classes(tmp_path):
    tf = pytest.importorskip("tensorflow")
    path = tmp_path / "train-0"
    for label in (1001, -1):
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(imagesets.example(b"picture", 7))
            writer.write(imagesets.example(b"picture", label))
        with pytest.raises(data.DataError, match="train-0: record 1 has the label"):
            imagefiles.index_records([path])


def test_a_file_that_shrinks(tmp_path, record):
    path = tmp_path / "train-0"
    path.write_bytes(record)
    images = imagefiles.index_records([path])
    path.write_bytes(record[:20])
    with pytest.raises(data.DataError, match="has become shorter"):
        images.read(0)


def test_records_without_validation(tmp_path):
    touch(tmp_path / "train-0")
    with pytest.raises(data.DataError, match="no validation"):
        imagefiles.find_records(tmp_path)


def test_no_records(tmp_path):
    assert imagefiles.find_records(tmp_path) is None
