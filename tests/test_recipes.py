"""The recipes' data: reading it, falling back, and sharing it out.

Needs neither Horovod nor a network.
"""

import gzip
import struct
import sys

import data
import numpy as np
import pytest

IMAGES = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 0, 9], np.uint8)


def idx(array, *, zeros=b"\0\0", kind=8, dims=None):
    """The array as an IDX file; the keywords falsify its header."""
    dims = array.shape if dims is None else dims
    return zeros + bytes([kind, len(dims)]) + struct.pack(f">{len(dims)}I", *dims) + array.tobytes()


def write_mnist(folder, pack=bytes, suffix="", **replaced):
    """Write the four files; `replaced` overrides train_labels and its like."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = ("train_images", "train_labels", "test_images", "test_labels")
    arrays = (IMAGES, LABELS, IMAGES[:2], LABELS[:2])
    for part, name, array in zip(parts, data.MNIST_FILES, arrays):
        blob = idx(replaced.get(part, array))
        (folder / (name + suffix)).write_bytes(pack(blob))


# --- one IDX file ---


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gz"])
@pytest.mark.parametrize("array, item_shape", [(IMAGES, (28, 28)), (LABELS, ())])
def test_read_idx(tmp_path, pack, array, item_shape):
    path = tmp_path / "file"
    path.write_bytes(pack(idx(array)))
    read = data.read_idx(path, item_shape)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)


DAMAGED = {
    "empty": (b"", "not an IDX file"),
    "three bytes": (b"\0\0\x08", "not an IDX file"),
    "magic": (idx(IMAGES, zeros=b"\x89P"), "not an IDX file"),
    "element type": (idx(IMAGES, kind=0x0D), "element type 0x0d"),
    "labels": (idx(LABELS), r"1 dimension\(s\), expected 3"),
    "header cut": (idx(IMAGES)[:9], "truncated inside its header"),
    "one byte less": (idx(IMAGES)[:-1], "promises 2352 bytes of data, file has 2351"),
    "one byte more": (idx(IMAGES) + b"\0", "promises 2352 bytes of data, file has 2353"),
    "image size": (idx(IMAGES, dims=(3, 14, 56)), r"shape \(14, 56\), expected \(28, 28\)"),
    "huge count": (idx(IMAGES, dims=(2**32 - 1, 28, 28)), "promises 3367254359280 bytes"),
    "huge size": (idx(IMAGES, dims=(3, 2**32 - 1, 2**32 - 1)), "items of shape"),
    "gzip cut": (gzip.compress(idx(IMAGES))[:-9], "damaged gzip file"),
    "gzip header": (b"\x1f\x8b" + bytes(30), "damaged gzip file"),
    "gzip of cut": (gzip.compress(idx(IMAGES)[:-1]), "file has 2351"),
}


@pytest.mark.parametrize("blob, message", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_named(tmp_path, blob, message):
    path = tmp_path / "some-file"
    path.write_bytes(blob)
    with pytest.raises(data.DataError, match=message) as caught:
        data.read_idx(path, (28, 28))
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(data.DataError, match="nothing: cannot be read"):
        data.read_idx(tmp_path / "nothing")


# --- a folder of four ---


@pytest.mark.parametrize("subfolder", ["", "mnist"])
@pytest.mark.parametrize("pack, suffix", [(bytes, ""), (gzip.compress, ".gz"), (bytes, ".gz")])
def test_read_folder(tmp_path, subfolder, pack, suffix):
    write_mnist(tmp_path / subfolder, pack, suffix)
    source, dataset = data.load_mnist(tmp_path)
    assert source == "idx"
    expected = (IMAGES, LABELS, IMAGES[:2], LABELS[:2])
    for read, array in zip(dataset, expected):
        np.testing.assert_array_equal(read, array)


def test_limited_cuts_training_data_only(tmp_path):
    write_mnist(tmp_path)
    dataset = data.read_mnist_folder(tmp_path)
    assert [len(array) for array in dataset.limited(1)] == [1, 1, 2, 2]
    assert [len(array) for array in dataset.limited(None)] == [3, 3, 2, 2]


def test_missing_folder(tmp_path):
    with pytest.raises(data.DataError, match="absent: no such folder"):
        data.load_mnist(tmp_path / "absent")


def test_folder_without_files_is_no_reason_to_fall_back(tmp_path):
    with pytest.raises(data.DataError) as caught:
        data.load_mnist(tmp_path)
    for name in data.MNIST_FILES:
        assert name in str(caught.value)


@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_missing_files_are_named(tmp_path, subfolder):
    folder = tmp_path / subfolder
    write_mnist(folder)
    (folder / data.MNIST_FILES[3]).unlink()
    with pytest.raises(data.DataError) as caught:
        data.load_mnist(tmp_path)
    assert str(caught.value) == f"{folder}: lacks t10k-labels-idx1-ubyte (raw or .gz)"


@pytest.mark.parametrize(
    "replaced, message",
    [
        ({"train_labels": LABELS[:2]}, "has 3 images, but .*train-labels.* has 2 labels"),
        ({"test_labels": np.array([10, 1], np.uint8)}, "t10k-labels.*label 10, expected 0 to 9"),
        ({"test_images": IMAGES[:0], "test_labels": LABELS[:0]}, "t10k-labels.*holds no labels"),
    ],
)
def test_files_that_do_not_fit(tmp_path, replaced, message):
    write_mnist(tmp_path, **replaced)
    with pytest.raises(data.DataError, match=message):
        data.load_mnist(tmp_path)


def test_default_folder(monkeypatch):
    monkeypatch.setenv("HVD_FEC_DATA_DIR", "somewhere")
    assert data.default_folder() == "somewhere"
    monkeypatch.setenv("HVD_FEC_DATA_DIR", "")
    assert data.default_folder() is None


# --- without a folder ---


def test_keras_comes_before_digits(monkeypatch):
    monkeypatch.setattr(data, "load_keras_mnist", lambda: "from keras")
    assert data.load_mnist() == ("keras", "from keras")


def test_digits_are_the_last_resort(monkeypatch):
    def offline():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(data, "load_keras_mnist", offline)
    source, dataset = data.load_mnist()
    assert source == "digits"
    assert dataset.train_images.shape == (1500, 28, 28)
    assert dataset.train_labels.shape == (1500,)
    assert dataset.test_images.shape == (297, 28, 28)
    assert dataset.test_labels.shape == (297,)
    assert all(array.dtype == np.uint8 for array in dataset)
    assert dataset.train_images.max() == 255
    assert set(dataset.train_labels) == set(dataset.test_labels) == set(range(10))


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(data.DataError, match="scikit-learn, which is not installed"):
        data.load_digits()


# --- sharding ---


def shards(examples, batch, size, how="random", epoch=0, seed=1):
    labels = np.arange(examples) % 7
    features = np.arange(examples)[:, None] / examples
    options = dict(batch=batch, size=size, seed=seed, epoch=epoch)
    return np.stack([data.shard(labels, features, how, rank=r, **options) for r in range(size)])


@pytest.mark.parametrize("how", data.SHARDINGS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shards_are_equal_and_disjoint(size, how):
    parts = shards(1003, 10, size, how)
    assert parts.shape == (size, 1003 // (10 * size), 10)
    assert len(np.unique(parts)) == parts.size
    assert parts.min() >= 0 and parts.max() < 1003


@pytest.mark.parametrize("how", data.SHARDINGS)
def test_shards_cover_all_if_it_divides(how):
    np.testing.assert_array_equal(np.sort(shards(96, 8, 3, how), axis=None), np.arange(96))


@pytest.mark.parametrize("how", data.SHARDINGS)
def test_shards_depend_on_seed_and_epoch_only(how):
    first = shards(100, 5, 2, how)
    np.testing.assert_array_equal(first, shards(100, 5, 2, how))
    assert (first != shards(100, 5, 2, how, epoch=1)).any()
    assert (first != shards(100, 5, 2, how, seed=2)).any()


def test_ranks_together_take_the_batch_of_one_process():
    together = np.concatenate(list(shards(100, 8, 3)), axis=1)
    alone = shards(100, 24, 1)[0]
    np.testing.assert_array_equal(np.sort(together), np.sort(alone))


def test_contiguous_shards_stay_where_they_are():
    for epoch in range(2):
        for rank, part in enumerate(shards(100, 5, 2, "contiguous", epoch)):
            np.testing.assert_array_equal(np.sort(part, axis=None), np.arange(50) + 50 * rank)


def test_stratified_batches_have_all_classes():
    for part in shards(700, 14, 5, "stratified"):
        for batch in part % 7:
            np.testing.assert_array_equal(np.bincount(batch), np.full(7, 2))


def test_sorted_by_label(tmp_path):
    write_mnist(tmp_path)
    dataset = data.read_mnist_folder(tmp_path).sorted_by_label()
    np.testing.assert_array_equal(dataset.train_labels, [0, 7, 9])
    np.testing.assert_array_equal(dataset.train_images, IMAGES[[1, 0, 2]])
    np.testing.assert_array_equal(dataset.test_labels, LABELS[:2])
