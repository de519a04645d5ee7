"""Image classifiers that give logits. Inputs are bytes; scaling is part of the model.

Logits are float32 whatever the precision of the rest: a loss needs the range.
"""

import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers


def resnet20(shape, classes):
    """ResNet-20 for CIFAR (He et al. 2015, arXiv 1512.03385, section 4.2): 0.27 M weights.

    Three stages of three blocks of two convolutions, 16, 32 and 64 channels wide.
    """
    inputs = layers.Input(shape)
    x = _norm_relu(_conv(16)(_centred(inputs)))
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = _norm_relu(_conv(width, stride)(x))
            y = _norm()(_conv(width)(y))
            if stride > 1:  # the paper's option A, zeros for new channels, as it needs no weights
                x = layers.Lambda(_halve)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, _logits(classes)(x), name="resnet20")


def vgg16(shape, classes):
    """VGG-16 (Simonyan and Zisserman 2014, arXiv 1409.1556) as it is used on CIFAR: 15 M weights.

    Its 13 convolutions with batch normalization, and one dense layer for three,
    as there are no 7 x 7 features left to flatten.
    """
    inputs = layers.Input(shape)
    x = _centred(inputs)
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            x = _norm_relu(_conv(width)(x))
        x = layers.MaxPooling2D(padding="same")(x)
    x = layers.Dropout(0.5)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, _logits(classes)(x), name="vgg16")


def resnet50(shape, classes):
    """ResNet-50 as Keras has it: 25.6 M weights for 1,000 classes."""
    inputs = layers.Input(shape)
    body = keras.applications.ResNet50(
        include_top=False, weights=None, input_tensor=_centred(inputs), pooling="avg"
    )
    return keras.Model(inputs, _logits(classes)(body.output), name="resnet50")


def alexnet(shape, classes):
    """AlexNet (Krizhevsky 2014, arXiv 1404.5997: the one-GPU form): 61 M weights for 1,000 classes.

    Nearly all of them sit in two dense layers, so there is much to exchange for
    little to compute. Images have at least 64 pixels a side.
    """
    inputs = layers.Input(shape)
    x = _centred(inputs)
    relu = {"activation": "relu", "kernel_initializer": "he_normal"}
    for width, kernel, stride, pooled in (
        (64, 11, 4, True),
        (192, 5, 1, True),
        (384, 3, 1, False),
        (256, 3, 1, False),
        (256, 3, 1, True),
    ):
        x = layers.Conv2D(width, kernel, stride, padding="same", **relu)(x)
        if pooled:
            x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(4096, **relu)(layers.Dropout(0.5)(x))
    return keras.Model(inputs, _logits(classes)(x), name="alexnet")


def _centred(inputs):
    """Bytes to numbers of about zero mean and unit variance."""
    return layers.Rescaling(1 / 64, offset=-2)(inputs)


def _conv(width, stride=1):
    # No bias: the normalization that follows has one.
    return layers.Conv2D(
        width, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
    )


def _norm():
    # With Keras's 0.99 tests would mean nothing in the first hundreds of steps.
    return layers.BatchNormalization(momentum=0.9)


def _halve(x):
    """Every other row and column, and zeros for as many channels again."""
    new = x.shape[-1] // 2
    return tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [new, new]])


def _norm_relu(x):
    return layers.ReLU()(_norm()(x))


def _logits(classes):
    return layers.Dense(classes, dtype="float32", name="logits")
