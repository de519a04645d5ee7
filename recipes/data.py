"""Training data for the recipes: where it comes from, and who trains on what.

Only NumPy is needed to read files; Keras and scikit-learn are imported by the
loaders that fall back on them. Data sets in files of their own, too large for
memory, are in imagefiles.py.
"""

import contextlib
import gzip
import io
import math
import os
import pickle
import socket
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvd_fec import sharding

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST_SHAPE = (28, 28)
MNIST_CLASSES = 10

CIFAR_SHAPE = (32, 32, 3)
CIFAR_PLANES = (3, 32, 32)  # as they lie in the files: all red, all green, all blue
CIFAR_CLASSES = {"cifar10": 10, "cifar100": 100}
# Folder in the archive -> files to train on, files to test on.
CIFAR_FILES = {
    ("cifar10", "binary"): (
        "cifar-10-batches-bin",
        [f"data_batch_{i}.bin" for i in range(1, 6)],
        ["test_batch.bin"],
    ),
    ("cifar10", "python"): (
        "cifar-10-batches-py",
        [f"data_batch_{i}" for i in range(1, 6)],
        ["test_batch"],
    ),
    ("cifar100", "binary"): ("cifar-100-binary", ["train.bin"], ["test.bin"]),
    ("cifar100", "python"): ("cifar-100-python", ["train"], ["test"]),
}

SHARDINGS = ("stratified", "random", "contiguous")

GZIP_MAGIC = b"\x1f\x8b"
IDX_UBYTE = 0x08  # IDX names its element type by a code; MNIST has bytes only
NETWORK_TIMEOUT = 5.0  # seconds of silence after which a download is given up
DIGITS_HELD_OUT = 297  # of scikit-learn's 1797 digits, for the test set


class DataError(Exception):
    """The data asked for is missing or damaged; the text is meant for the user."""


class Dataset(NamedTuple):
    """Images as uint8 [n, height, width] or [n, height, width, 3], labels as uint8 [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def limited(self, examples):
        """The same data with at most `examples` to train on (None: all)."""
        return self._training(slice(examples))

    def sorted_by_label(self):
        """The same data in the order that class directories give: one class after another."""
        return self._training(np.argsort(self.train_labels, kind="stable"))

    def _training(self, chosen):
        return self._replace(
            train_images=self.train_images[chosen], train_labels=self.train_labels[chosen]
        )


# --- IDX files --------------------------------------------------------------


def read_idx(path, item_shape=()):
    """Read an IDX file of bytes, raw or gzipped, into an array [n, *item_shape].

    Everything the header claims is checked, so that a damaged or mixed-up file
    is reported here, by name, and not as a bad accuracy later.
    """
    blob = _read_unpacked(path)
    dims_expected = 1 + len(item_shape)
    data_start = 4 + 4 * dims_expected
    if len(blob) < 4 or blob[:2] != b"\0\0":
        raise DataError(f"{path}: not an IDX file (must start with two zero bytes)")
    kind, dims = blob[2], blob[3]
    if kind != IDX_UBYTE:
        raise DataError(f"{path}: element type 0x{kind:02x}, expected 0x08 (bytes)")
    if dims != dims_expected:
        raise DataError(f"{path}: {dims} dimension(s), expected {dims_expected}")
    if len(blob) < data_start:
        raise DataError(f"{path}: truncated inside its header")

    shape = tuple(int(n) for n in np.frombuffer(blob, ">u4", dims, offset=4))
    if shape[1:] != tuple(item_shape):
        raise DataError(f"{path}: items of shape {shape[1:]}, expected {item_shape}")
    found, promised = len(blob) - data_start, math.prod(shape)
    if found != promised:
        raise DataError(f"{path}: header promises {promised} bytes of data, file has {found}")
    return np.frombuffer(blob, np.uint8, offset=data_start).reshape(shape)


def _read_unpacked(path):
    """The bytes of a file, unzipped if the content, not the name, says gzip."""
    try:
        blob = Path(path).read_bytes()
        return gzip.decompress(blob) if blob[:2] == GZIP_MAGIC else blob
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_mnist_folder(folder):
    """Read the four MNIST files from `folder` or from its subfolder mnist/."""
    paths = _find_mnist_files(Path(folder))
    shapes = (MNIST_SHAPE, (), MNIST_SHAPE, ())
    dataset = Dataset(*map(read_idx, paths, shapes))
    for part, (images, labels) in enumerate((dataset[:2], dataset[2:])):
        image_file, label_file = paths[2 * part : 2 * part + 2]
        if len(images) != len(labels):
            raise DataError(
                f"{image_file} has {len(images)} images, but {label_file} has {len(labels)} labels"
            )
        if not len(labels):
            raise DataError(f"{label_file}: holds no labels")
        if labels.max() >= MNIST_CLASSES:
            raise DataError(f"{label_file}: label {labels.max()}, expected 0 to 9")
    return dataset


def _find_mnist_files(folder):
    """Paths of the four files, each raw or .gz, or an error that names them."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")

    def find(base, name):
        candidates = (base / name, base / f"{name}.gz")
        return next((path for path in candidates if path.is_file()), None)

    bases = (folder, folder / "mnist")
    found = {base: [find(base, name) for name in MNIST_FILES] for base in bases}
    # The folder with more of the files is the one meant; its gaps are the news.
    base = max(bases, key=lambda base: sum(path is not None for path in found[base]))
    missing = [name for name, path in zip(MNIST_FILES, found[base]) if path is None]
    if missing:
        raise DataError(f"{base}: lacks {', '.join(missing)} (raw or .gz)")
    return found[base]


# --- CIFAR files ------------------------------------------------------------


def load_cifar(kind, folder):
    """Return (source, Dataset) of `kind` "cifar10" or "cifar100"; source is "binary" or "python".

    `folder` holds the files, or the folder in which the archives pack them, or
    a folder cifar10/ or cifar100/ with that. Keras brings CIFAR when `folder`
    is None.
    """
    if not folder:
        return "keras", _load_keras_cifar(kind)
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    for (of_kind, source), (packed, train, test) in CIFAR_FILES.items():
        bases = [base / sub for base in (folder, folder / kind) for sub in ("", packed)]
        found = [base for base in bases if (base / train[0]).is_file()]
        if of_kind == kind and found:
            read = read_cifar_binary if source == "binary" else read_cifar_pickle
            parts = []
            for names in (train, test):
                pairs = [read(kind, found[0] / name) for name in names]
                parts += map(np.concatenate, zip(*pairs))
            return source, Dataset(*parts)
    wanted = [f"{p}/" for (of_kind, _), (p, *_) in CIFAR_FILES.items() if of_kind == kind]
    raise DataError(f"{folder}: has neither {' nor '.join(wanted)} with {kind}'s files")


def read_cifar_binary(kind, path):
    """One file of records of a label (CIFAR-100: coarse, then fine) and the planes."""
    label_bytes = 1 if kind == "cifar10" else 2
    record = label_bytes + math.prod(CIFAR_PLANES)
    blob = np.frombuffer(_read_unpacked(path), np.uint8)
    if not len(blob) or len(blob) % record:
        raise DataError(f"{path}: {len(blob)} bytes are not whole records of {record}")
    records = blob.reshape(-1, record)
    return _cifar_arrays(kind, path, records[:, label_bytes:], records[:, label_bytes - 1])


def read_cifar_pickle(kind, path):
    """One file of the python version: a pickled dict with data and labels."""
    try:
        batch = _CifarUnpickler(io.BytesIO(_read_unpacked(path)), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels" if kind == "cifar10" else b"fine_labels"])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # the bytes of a damaged pickle can raise nearly anything
        raise DataError(f"{path}: not a {kind} batch ({error!r})") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != math.prod(CIFAR_PLANES):
        raise DataError(f"{path}: data is {pixels.dtype} of shape {pixels.shape}, not of images")
    if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: {len(pixels)} images, but labels of shape {labels.shape}")
    return _cifar_arrays(kind, path, pixels, labels)


class _CifarUnpickler(pickle.Unpickler):
    """A pickle can call anything; the batches call only what rebuilds an array."""

    def find_class(self, module, name):
        # The files are from Python 2 and NumPy 1; later ones have moved a module.
        module = module.replace("numpy._core", "numpy.core")
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return _reconstruct
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # bytes, if written by Python 3
            return _encode
        raise DataError(f"asks for {module}.{name}, which no CIFAR batch does")


def _reconstruct(kind, shape, typecode):
    if kind is not np.ndarray or shape != (0,):  # its size comes later, with its bytes
        raise DataError("holds an object that is no array")
    return np.ndarray.__new__(np.ndarray, shape, np.dtype(typecode))


def _encode(text, encoding):
    if encoding not in ("latin1", b"latin1"):
        raise DataError(f"holds text in {encoding!r}")
    return text.encode("latin1")


def _cifar_arrays(kind, path, pixels, labels):
    if len(labels) and not 0 <= labels.min() <= labels.max() < CIFAR_CLASSES[kind]:
        bad = labels.max() if labels.min() >= 0 else labels.min()
        raise DataError(f"{path}: label {bad}, expected 0 to {CIFAR_CLASSES[kind] - 1}")
    images = pixels.reshape(-1, *CIFAR_PLANES).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.uint8)


def _load_keras_cifar(kind):
    from tensorflow import keras

    try:
        train, test = _quietly(getattr(keras.datasets, kind).load_data)
    except Exception as error:  # Keras raises bare Exception if offline
        raise DataError(f"{kind} is not at hand: give its folder by --data-dir") from error
    return Dataset(train[0], train[1].ravel(), test[0], test[1].ravel())


# --- MNIST, or the best that is at hand -------------------------------------


def load_mnist(folder=None):
    """Return (source, Dataset); source is "idx", "keras" or "digits".

    A folder that was asked for must deliver: falling back would train on other
    data than the user believes. Without one, Keras's own copy is tried, and
    then the small set of digits that scikit-learn brings along.
    """
    if folder:
        return "idx", read_mnist_folder(folder)
    with contextlib.suppress(Exception):  # Keras raises bare Exception if offline
        return "keras", load_keras_mnist()
    return "digits", load_digits()


def load_keras_mnist():
    """MNIST from Keras's cache or download."""
    from tensorflow import keras

    train, test = _quietly(keras.datasets.mnist.load_data)
    return Dataset(*train, *test)


def _quietly(load):
    """Call a loader of Keras without its chatter or long waits."""
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT)  # Keras offers no timeout itself
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return load()
    finally:
        socket.setdefaulttimeout(patience)


def load_digits():
    """scikit-learn's 8x8 digits, brought to the size and range of MNIST."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise DataError(
            "MNIST is not at hand (no --data-dir, no Keras copy, no network) and "
            "the stand-in needs scikit-learn, which is not installed"
        ) from error
    small, labels = load(return_X_y=True)
    small = small.reshape(-1, 8, 8) * (255 / 16)
    # Threefold size plus a border: MNIST too centres its digits on an empty rim.
    images = np.pad(np.kron(small, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    images, labels = images.round().astype(np.uint8), labels.astype(np.uint8)
    # The set is ordered by writer, so its tail tests on hands not trained on.
    cut = len(labels) - DIGITS_HELD_OUT
    return Dataset(images[:cut], labels[:cut], images[cut:], labels[cut:])


def default_folder():
    """The folder named by the environment, or None."""
    return os.environ.get("HVD_FEC_DATA_DIR") or None


# --- Who trains on what -----------------------------------------------------


def shard(labels, features, how, *, batch, rank, size, seed, epoch):
    """Indices [steps, batch] that `rank` trains on in `epoch`, sharded as `how` says.

    All ranks get the same number of full batches: a rank with one step more
    would wait for ever in an allreduce that the others never join. Nobody needs
    to be asked, as seed and epoch say it all.

    `labels` are [n], `features` [n, f] or None. "stratified": every shard, and
    every batch in it, has the class proportions of the whole, and the shards its
    features' means and variances. "random": the ranks take turns in one
    permutation, so that their batches of a step are together the batch that one
    process would take, were it `size` times as large. "contiguous": a rank keeps
    its stretch of the data for good and shuffles inside.
    """
    if how == "stratified":
        order = sharding.stratified_shard(
            labels, rank, size, features=features, seed=seed, epoch=epoch, batch_size=batch
        )
    elif how == "random":
        order = sharding.random_shard(len(labels), rank, size, seed, epoch)
    else:
        order = sharding.contiguous_shard(len(labels), rank, size)
        np.random.default_rng([seed, epoch, rank]).shuffle(order)
    steps = len(order) // batch
    return order[: steps * batch].reshape(steps, batch)
