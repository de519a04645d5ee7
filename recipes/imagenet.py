"""Train ResNet-50 or AlexNet on ImageNet or Tiny ImageNet with compressed gradients.

    horovodrun -np 2 python recipes/imagenet.py --data-dir ~/imagenet --compression fec

--data-dir has one of three layouts, and each host needs to see it:
  train-*, validation-*            TFRecords with image/encoded and image/class/label
  train/CLASS/..., val/CLASS/...   a directory per class
  train/, val/val_annotations.txt  Tiny ImageNet as it comes (with --image-size 64)
"""

import argparse

import common
import horovod.tensorflow.keras as hvd
import imagefiles
import models
import numpy as np
import tensorflow as tf
from data import DataError
from horovod.tensorflow import allgather_object, broadcast_object

MODELS = {"resnet50": models.resnet50, "alexnet": models.alexnet}
READERS = 16  # images that a rank reads and decodes at a time
CROP_AREA = (0.08, 1.0)  # of the image, for a random crop
SHORT_SIDE = 256 / 224  # for testing: of the image, relative to the crop from its middle


class ImageFiles(common.Source):
    """Images that every rank reads for itself, when it needs them."""

    def __init__(self, train, test, args):
        if args.limit_train and args.limit_train < len(train.labels):
            # Not the first: those are all of the same few classes.
            some = np.random.default_rng(args.seed).permutation(len(train.labels))
            some = np.sort(some[: args.limit_train])
            train = train._replace(**{f: getattr(train, f)[some] for f in train._fields[1:]})
        if args.label_sorted:
            order = np.argsort(train.labels, kind="stable")
            train = train._replace(**{f: getattr(train, f)[order] for f in train._fields[1:]})
        self._train, self._test, self._size = train, test, args.image_size
        super().__init__(train.labels, None, test.labels, args)

    def training(self, order, seed, first):
        labels = tf.constant(self._train.labels)

        def load(number, index):
            key = tf.stack([seed, tf.cast(number, tf.int32)])
            return _distort(_read(self._train, index), key, self._size), labels[index]

        batch = order.shape[1]
        return (
            tf.data.Dataset.from_tensor_slices(order[first:].ravel())
            .enumerate(first * batch)
            .map(load, READERS)
            .batch(batch)
        )

    def testing(self):
        return (
            tf.data.Dataset.from_tensor_slices(self.test_indices)
            .map(lambda index: _centre(_read(self._test, index), self._size), READERS)
            .batch(min(self.args.batch_size, common.EVALUATION_BATCH))
        )


def _read(images, index):
    """One image as bytes [height, width, 3], be it a JPEG or a PNG file."""
    blob = tf.numpy_function(images.read, [index], tf.string, stateful=False)
    return tf.ensure_shape(
        tf.io.decode_image(tf.ensure_shape(blob, []), 3, expand_animations=False), [None, None, 3]
    )


def _distort(image, seed, size):
    """A random part of the image, scaled to size x size, flipped half of the time."""
    crop_seed, flip_seed = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        crop_seed,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=CROP_AREA,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.resize(tf.slice(image, begin, extent), [size, size])
    return tf.image.stateless_random_flip_left_right(image, flip_seed)


def _centre(image, size):
    """The middle of the image, scaled so that a margin is left all around."""
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    scale = size * SHORT_SIDE / tf.minimum(height, width)
    shape = tf.cast(tf.round([height * scale, width * scale]), tf.int32)
    return tf.image.resize_with_crop_or_pad(tf.image.resize(image, shape), size, size)


def find_images(folder):
    """Return (layout, train, test, number of classes): the same on all ranks.

    Rank 0 lists the files, so that all ranks number them alike. TFRecords have
    to be looked through, which the ranks share out.
    """
    found = problem = None
    if hvd.rank() == 0:
        try:
            if not folder:
                raise DataError("give the folder of the images by --data-dir")
            found = imagefiles.find_records(folder) or imagefiles.read_tree(folder)
        except (DataError, OSError) as error:
            problem = str(error)
    found, problem = broadcast_object((found, problem), root_rank=0)
    if problem:
        common.fail(problem)
    if len(found) == 3:
        train, test, names = found
        return "tree", train, test, len(names)
    return ("records", *map(_index_together, found), imagefiles.RECORD_CLASSES)


def _index_together(paths):
    part = problem = None
    try:
        part = imagefiles.index_records(paths[hvd.rank() :: hvd.size()])
    except DataError as error:
        problem = str(error)
    everyone = allgather_object((part, problem))
    problem = next((problem for _, problem in everyone if problem), None)
    if problem:
        common.fail(problem)
    return imagefiles.joined([part for part, _ in everyone])


def main():
    parser = common.option_parser(
        __doc__.splitlines()[0], epochs=90, batch_size=32, lr=0.0125, warmup_epochs=5
    )
    parser.epilog = "".join(__doc__.partition("--data-dir has")[1:])
    parser.formatter_class = _Formatter
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet50", help="what to train")
    add("--image-size", type=int, default=224, help="of the square that the model sees")
    args = parser.parse_args()
    common.start(args)
    layout, train, test, classes = find_images(args.data_dir)
    common.say(f"{len(train.labels)} images to train on, {len(test.labels)} to test on")

    model = MODELS[args.model]((args.image_size, args.image_size, 3), classes)
    if args.verbose:
        model.summary(print_fn=common.say)
    source = ImageFiles(train, test, args)
    common.train(
        model,
        common.sgd(args, source.steps, weight_decay=5e-4),
        source,
        args,
        recipe="imagenet",
        settings={"model": args.model, "image_size": args.image_size},
        origin=layout,
    )


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the options' help, and the text at the end as it is."""


if __name__ == "__main__":
    main()
