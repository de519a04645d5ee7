"""Train a small CNN on MNIST with compressed gradients.

    horovodrun -np 2 python recipes/mnist.py --compression fec --epochs 2

The data comes from the IDX files in --data-dir, else from Keras (cached or
downloaded), else from the small set of digits in scikit-learn.
"""

import common
import data
from tensorflow import keras
from tensorflow.keras import layers

FALLBACK_NOTE = (
    "MNIST is not at hand: training on scikit-learn's 8x8 digits instead. "
    "Give the folder of the MNIST files by --data-dir."
)


def build_cnn():
    """Two convolutions and a dense layer: 421,642 weights, 1.7 MB of gradients.

    Nearly all of them sit in the dense layer, whose gradient is the kind that
    compresses well, while the convolutions do the work. He's initial weights are
    those for ReLU; with Keras's default, higher rates are slow to take off or fail.
    """
    relu = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            layers.Input(data.MNIST_SHAPE),
            layers.Reshape((*data.MNIST_SHAPE, 1)),
            layers.Rescaling(1 / 255),  # in the model, so that data stays bytes
            layers.Conv2D(32, 3, padding="same", **relu),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", **relu),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, **relu),
            layers.Dense(data.MNIST_CLASSES, dtype="float32"),
        ]
    )


def build_mlp():
    """Three dense layers: 1,863,690 weights, 7.5 MB of gradients, and little to compute."""
    relu = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            layers.Input(data.MNIST_SHAPE),
            layers.Flatten(),
            layers.Rescaling(1 / 255),
            layers.Dense(1024, **relu),
            layers.Dense(1024, **relu),
            layers.Dense(data.MNIST_CLASSES, dtype="float32"),
        ]
    )


MODELS = {"cnn": build_cnn, "mlp": build_mlp}


def main():
    parser = common.option_parser(__doc__.splitlines()[0], epochs=2, batch_size=64, lr=0.01)
    parser.add_argument("--model", choices=MODELS, default="cnn", help="what to train")
    args = parser.parse_args()
    common.start(args)
    origin, dataset = common.load_on_root(lambda: data.load_mnist(args.data_dir))
    if origin == "digits":
        common.say(FALLBACK_NOTE)

    model = MODELS[args.model]()
    if args.verbose:
        model.summary(print_fn=common.say)
    source = common.InMemory(dataset, args)
    # A training as short as this one needs no decay.
    optimizer = common.sgd(args, source.steps, decay=False)
    common.train(
        model,
        optimizer,
        source,
        args,
        recipe="mnist",
        settings={"model": args.model},
        origin=origin,
    )


if __name__ == "__main__":
    main()
