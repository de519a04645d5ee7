"""Writes small data sets in the formats that the recipes read. Classes differ in colour."""

import pickle

import numpy as np

CLASS_NAMES = ["n01443537", "n01629819", "n01641577"]


def pictures(labels, size=32, seed=0):
    """uint8 [n, size, size, 3]: noise around a colour for each label."""
    rng = np.random.default_rng(seed)
    colours = np.random.default_rng(1).integers(40, 216, (1000, 1, 1, 3))
    noise = rng.integers(-40, 40, (len(labels), size, size, 3))
    return (colours[np.asarray(labels)] + noise).astype(np.uint8)


def planes(images):
    """Rows as they lie in CIFAR's files."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def python2_pickle(rows, labels, key=b"labels"):
    """What Python 2 and NumPy 1 wrote: pickle protocol 2 with strings of bytes."""

    def string(text):
        return b"T" + len(text).to_bytes(4, "little") + text

    def number(value):
        return b"J" + int(value).to_bytes(4, "little", signed=True)

    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85"
    array += string(b"b") + b"tR(" + number(1) + number(rows.shape[0]) + number(rows.shape[1])
    array += b"\x86cnumpy\ndtype\n(" + string(b"u1") + number(0) + number(1) + b"tR("
    array += number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array += b"\x89" + string(rows.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    batch = string(b"batch_label") + string(b"a batch") + string(b"data") + array
    return b"\x80\x02}(" + batch + string(key) + listed + b"u."


def write_cifar(folder, kind, form, per_file=40):
    """Return the arrays (train images, train labels, test images, test labels) written."""
    import data

    packed, train, test = data.CIFAR_FILES[kind, form]
    base = folder / packed
    base.mkdir(parents=True)
    rng, written = np.random.default_rng(3), []
    for names in (train, test):
        labels = rng.integers(data.CIFAR_CLASSES[kind], size=per_file * len(names))
        images = pictures(labels)
        written += [images, labels]
        for name, i in zip(names, range(0, len(labels), per_file)):
            part = slice(i, i + per_file)
            rows, own = planes(images[part]), labels[part]
            if form == "binary":
                columns = [own[:, None].astype(np.uint8), rows]
                if kind == "cifar100":
                    columns.insert(0, own[:, None].astype(np.uint8) // 5)
                blob = np.concatenate(columns, axis=1).tobytes()
            elif kind == "cifar10":
                blob = python2_pickle(rows, own)
            else:
                fine = {b"data": rows, b"fine_labels": own.tolist()}
                blob = pickle.dumps({**fine, b"coarse_labels": (own // 5).tolist()}, protocol=2)
            (base / name).write_bytes(blob)
    return written


def encode(image, png=False):
    import tensorflow as tf

    return (tf.io.encode_png if png else tf.io.encode_jpeg)(image).numpy()


def write_tree(folder, per_class=12, size=72):
    """Directories per class: JPEGs of different sizes, and a PNG with a JPEG's name."""
    for part, count in (("train", per_class), ("val", 4)):
        for label, name in enumerate(CLASS_NAMES):
            base = folder / part / name
            base.mkdir(parents=True)
            for i in range(count):
                [image] = pictures([label], size + i, seed=i)
                (base / f"{name}_{i}.JPEG").write_bytes(encode(image[:size], png=i == 0))


def write_tiny(folder, per_class=6, size=64):
    """Tiny ImageNet's layout, with its text files of bounding boxes."""
    for label, name in enumerate(CLASS_NAMES):
        base = folder / "train" / name / "images"
        base.mkdir(parents=True)
        (base.parent / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t63\t63\n")
        for i, image in enumerate(pictures([label] * per_class, size)):
            (base / f"{name}_{i}.JPEG").write_bytes(encode(image))
    base = folder / "val" / "images"
    base.mkdir(parents=True)
    rows, labels = [], [2, 0, 1, 0]
    for i, image in enumerate(pictures(labels, size)):
        (base / f"val_{i}.JPEG").write_bytes(encode(image))
        rows.append(f"val_{i}.JPEG\t{CLASS_NAMES[labels[i]]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))
    (folder / "wnids.txt").write_text("\n".join(CLASS_NAMES))
    return labels


def example(image, label):
    """A record with the features of the usual ImageNet files."""
    import tensorflow as tf

    def ints(*values):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def text(value):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    features = {
        "image/height": ints(64),
        "image/class/label": ints(label),
        "image/class/synset": text(b"n01443537"),
        "image/object/bbox/xmin": tf.train.Feature(float_list=tf.train.FloatList(value=[0.1, 0.2])),
        "image/object/bbox/label": ints(label, label),
        "image/encoded": text(image),
        "image/format": text(b"JPEG"),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_records(folder, counts=(17, 11, 8), size=72):
    """TFRecord files of different lengths, labels from 1 on; a validation file."""
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    names = [f"train-{i:05}-of-{len(counts):05}" for i in range(len(counts))]
    names.append("validation-00000-of-00001")
    for seed, (name, count) in enumerate(zip(names, (*counts, 6))):
        labels = np.arange(count) % 3 + 1
        with tf.io.TFRecordWriter(str(folder / name)) as writer:
            for image, label in zip(pictures(labels, size, seed), labels):
                writer.write(example(encode(image), label))
