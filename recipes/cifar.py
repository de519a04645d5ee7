"""Train ResNet-20 or VGG-16 on CIFAR-10 or CIFAR-100 with compressed gradients.

    horovodrun -np 2 python recipes/cifar.py --data-dir ~/data --compression fec

The data comes from --data-dir, in the binary or the python version of the files,
or from Keras (cached or downloaded).
"""

import common
import data
import models
import tensorflow as tf

MODELS = {"resnet20": models.resnet20, "vgg16": models.vgg16}
BORDER = 4  # pixels by which a crop may be off


def augment(images, seed):
    """Flip and shift: bytes [n, height, width, 3], seed int32 [2], to images of the same shape."""
    n, height, width = tf.unstack(tf.shape(images)[:3])
    flip_seed, shift_seed = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
    flip = tf.random.stateless_uniform([n, 1, 1, 1], flip_seed) < 0.5
    images = tf.where(flip, images[:, :, ::-1], images)
    shift = tf.random.stateless_uniform([2, n, 1], shift_seed, 0, 2 * BORDER + 1, tf.int32)
    images = tf.pad(images, [[0, 0], [BORDER] * 2, [BORDER] * 2, [0, 0]])
    images = tf.gather(images, shift[0] + tf.range(height), axis=1, batch_dims=1)
    return tf.gather(images, shift[1] + tf.range(width), axis=2, batch_dims=1)


def main():
    parser = common.option_parser(
        __doc__.splitlines()[0], epochs=160, batch_size=64, lr=0.05, warmup_epochs=5
    )
    add = parser.add_argument
    add("--dataset", choices=data.CIFAR_CLASSES, default="cifar10", help="which of the two")
    add("--model", choices=MODELS, default="resnet20", help="what to train")
    add("--no-augment", action="store_true", help="train on the images as they are")
    args = parser.parse_args()
    common.start(args)
    origin, dataset = common.load_on_root(lambda: data.load_cifar(args.dataset, args.data_dir))

    model = MODELS[args.model](data.CIFAR_SHAPE, data.CIFAR_CLASSES[args.dataset])
    if args.verbose:
        model.summary(print_fn=common.say)
    source = common.InMemory(dataset, args, None if args.no_augment else augment)
    common.train(
        model,
        common.sgd(args, source.steps, weight_decay=5e-4),
        source,
        args,
        recipe="cifar",
        settings={"dataset": args.dataset, "model": args.model, "augment": not args.no_augment},
        origin=origin,
    )


if __name__ == "__main__":
    main()
