"""Image data sets too large for memory: where each image lies, and its label.

Whatever the layout, an image is a piece of a file, and the index of all pieces
is small (16 bytes an image). So all layouts are sharded, shuffled and resumed
alike, and each rank reads just what it trains on. Only NumPy is needed here.
"""

import mmap
import os
from pathlib import Path
from typing import List, NamedTuple

import numpy as np
from data import DataError

from hvd_fec import sharding

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
TINY_ANNOTATIONS = "val_annotations.txt"

# The usual TFRecords of ImageNet number its classes from 1 and leave 0 to
# "background", and others start at 0. An output more is cheaper than a mistake.
RECORD_CLASSES = 1001

RECORD_HEAD, RECORD_TAIL = 12, 4  # length and its checksum; the data's checksum
IMAGE_KEY, LABEL_KEY = b"image/encoded", b"image/class/label"


class Images(NamedTuple):
    """Where `n` encoded images lie.

    `paths` are the files; `file` int32 [n] says in which of them an image is,
    `offset` and `length` int64 [n] where in it (length -1: all of the file),
    `labels` int64 [n] what it shows.
    """

    paths: List[str]
    file: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    labels: np.ndarray

    def read(self, index):
        """The encoded bytes of one image."""
        path, length = self.paths[self.file[index]], int(self.length[index])
        with open(path, "rb") as stream:
            stream.seek(self.offset[index])
            blob = stream.read(length)
        if length >= 0 and len(blob) != length:
            raise DataError(f"{path}: has become shorter since it was indexed")
        return blob


def whole_files(paths, labels):
    """Images that are files of their own."""
    n = len(paths)
    return Images(
        [str(path) for path in paths],
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int64),
        np.full(n, -1, np.int64),
        np.asarray(labels, np.int64),
    )


def joined(parts):
    """The images of all parts, one part after the other."""
    starts = np.cumsum([0] + [len(part.paths) for part in parts])
    return Images(
        [path for part in parts for path in part.paths],
        np.concatenate([part.file + start for part, start in zip(parts, starts)]).astype(np.int32),
        *(np.concatenate([part[field] for part in parts]) for field in (2, 3, 4)),
    )


# --- Directory trees --------------------------------------------------------


def read_tree(folder):
    """Return (train, test, class names) of train/CLASS/... and val/CLASS/...

    Tiny ImageNet's layout is recognised: its test images lie in val/images/, and
    val/val_annotations.txt says what they show.
    """
    train, names = _read_classes(Path(folder) / "train")
    val = Path(folder) / "val"
    if (val / TINY_ANNOTATIONS).is_file():
        return train, _read_annotated(val, names), names
    test, test_names = _read_classes(val)
    if test_names != names:
        odd = sorted(set(names) ^ set(test_names))
        raise DataError(f"{folder}: train/ and val/ have different classes: {', '.join(odd[:5])}")
    return train, test, names


def _read_classes(folder):
    try:
        paths, labels, names = sharding.directory_labels(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {error}") from error
    # Tiny ImageNet has a text file of bounding boxes with each class.
    images = [i for i, path in enumerate(paths) if path.lower().endswith(IMAGE_SUFFIXES)]
    if not images:
        raise DataError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)})")
    return whole_files([paths[i] for i in images], labels[images]), names


def _read_annotated(val, names):
    paths, labels = [], []
    number = {name: i for i, name in enumerate(names)}
    path = val / TINY_ANNOTATIONS
    for row, line in enumerate(path.read_text().splitlines(), 1):
        image, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in number:
            raise DataError(f"{path}:{row}: class {name!r} is not among those of train/")
        paths.append(val / "images" / image)
        labels.append(number[name])
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise DataError(f"{path}: lists {missing[0] if missing else 'no image'}, which is no file")
    return whole_files(paths, labels)


# --- TFRecords --------------------------------------------------------------


def find_records(folder):
    """Return the sorted paths (train, test) of train-* and validation-* (or val-*), or None."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    train = [str(path) for path in files if path.name.startswith("train-")]
    test = [str(path) for path in files if path.name.startswith(("validation-", "val-"))]
    if not train:
        return None
    if not test:
        raise DataError(f"{folder}: has train-* but no validation-* files")
    return train, test


def index_records(paths):
    """Images of TFRecord files with the features image/encoded and image/class/label.

    The records are not decoded: only lengths and keys are looked at, and the
    system reads just the pages that have them. Raises DataError for files that
    end too early or hold something else.
    """
    parts = [_index_record_file(path) for path in paths]
    return joined(parts) if parts else whole_files([], [])


def _index_record_file(path):
    rows = []
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size:
                raise DataError(f"{path}: empty")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                start = 0
                while start < size:
                    length = int.from_bytes(blob[start : start + 8], "little")
                    begin = start + RECORD_HEAD
                    start = begin + length + RECORD_TAIL
                    if start > size:
                        raise DataError(f"{path}: ends inside record {len(rows)}")
                    rows.append(_index_example(blob, begin, begin + length))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except _NotAnExample as error:
        raise DataError(f"{path}: record {len(rows)} {error}") from error
    offset, length, labels = np.array(rows, np.int64).T
    return Images([str(path)], np.zeros(len(rows), np.int32), offset, length, labels)


class _NotAnExample(Exception):
    """A record is no tf.train.Example as it should be."""


def _index_example(blob, begin, end):
    """(offset, length, label) of the image in the tf.train.Example at blob[begin:end].

    Example, Features and the map's entries are messages in messages, the field
    of interest being number 1 (a key) or 2 (a value).
    """
    found = {}
    for _, *features in _fields(blob, begin, end, 1):  # Example.features
        for _, *entry in _fields(blob, *features, 1):  # Features.feature
            parts = {n: (b, e) for n, b, e in _fields(blob, *entry, 1, 2)}
            if 1 in parts and 2 in parts and parts[1][1] - parts[1][0] <= len(LABEL_KEY):
                found[blob[slice(*parts[1])]] = parts[2]
    for key in (IMAGE_KEY, LABEL_KEY):
        if key not in found:
            raise _NotAnExample(f"has no {key.decode()}")
    # Feature.bytes_list is field 1 and its first value field 1; Feature.int64_list is field 3.
    offset, image_end = _first(blob, _first(blob, found[IMAGE_KEY], 1), 1)
    label = _first_integer(blob, *_first(blob, found[LABEL_KEY], 3))
    if label >= RECORD_CLASSES:
        raise _NotAnExample(f"has the label {label}, expected at most {RECORD_CLASSES - 1}")
    return offset, image_end - offset, label


def _first(blob, span, number):
    for _, begin, end in _fields(blob, *span, number):
        return begin, end
    raise _NotAnExample("has no image or no label where they should be")


def _fields(blob, position, end, *wanted):
    """(number, begin, end) of the length-delimited fields with the wanted numbers."""
    while position < end:
        tag, position = _varint(blob, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, position = _varint(blob, position, end)
            continue
        if kind == 2:
            size, position = _varint(blob, position, end)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise _NotAnExample("is no tf.train.Example")
        if position + size > end:
            raise _NotAnExample("is no tf.train.Example")
        if kind == 2 and number in wanted:
            yield number, position, position + size
        position += size


def _first_integer(blob, position, end):
    """The first value of an Int64List, whose values are packed or stand one by one."""
    tag, position = _varint(blob, position, end)
    if tag == (1 << 3 | 2):
        _, position = _varint(blob, position, end)  # of how many bytes
    elif tag != 1 << 3:
        raise _NotAnExample("is no tf.train.Example")
    return _varint(blob, position, end)[0]


def _varint(blob, position, end):
    value = shift = 0
    while position < end and shift < 64:
        byte = blob[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _NotAnExample("is no tf.train.Example")
