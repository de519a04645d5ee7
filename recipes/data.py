"""Training data for the recipes: where it comes from, and who trains on what.

Only NumPy is needed to read files; Keras and scikit-learn are imported by the
loaders that fall back on them.
"""

import contextlib
import gzip
import io
import math
import os
import socket
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST_SHAPE = (28, 28)
CLASSES = 10

GZIP_MAGIC = b"\x1f\x8b"
IDX_UBYTE = 0x08  # IDX names its element type by a code; MNIST has bytes only
NETWORK_TIMEOUT = 5.0  # seconds of silence after which a download is given up
DIGITS_HELD_OUT = 297  # of scikit-learn's 1797 digits, for the test set


class DataError(Exception):
    """The data asked for is missing or damaged; the text is meant for the user."""


class Dataset(NamedTuple):
    """Images as uint8 [n, height, width], labels as uint8 [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def limited(self, examples):
        """The same data with at most `examples` to train on (None: all)."""
        return self._replace(
            train_images=self.train_images[:examples],
            train_labels=self.train_labels[:examples],
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
        if labels.max() >= CLASSES:
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
    """MNIST from Keras's cache or download, without its chatter or long waits."""
    from tensorflow import keras

    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT)  # Keras offers no timeout itself
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train, test = keras.datasets.mnist.load_data()
    finally:
        socket.setdefaulttimeout(patience)
    return Dataset(*train, *test)


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


# --- Sharding ---------------------------------------------------------------


def shard(examples, batch, steps, rank, size, seed, epoch):
    """Indices [steps, batch] that `rank` trains on in `epoch`.

    All ranks draw the same permutation and take every size-th entry of it, so
    their shares are disjoint without a word exchanged. All shares have the same
    number of full batches: a rank with one step more would wait for ever in an
    allreduce that the others never join. The few examples left over differ from
    epoch to epoch. Together the ranks' batches of a step are the batch that one
    process would take, were it `size` times as large.
    """
    order = np.random.default_rng([seed, epoch]).permutation(examples)
    return order[rank::size][: steps * batch].reshape(steps, batch)
