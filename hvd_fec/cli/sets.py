"""Shapes of the gradients of some models, to try an exchange on."""


def resnet50():
    """Kernels, batch norm and classifier of ResNet-50: 161 tensors, 25.6 million values."""
    shapes = [(7, 7, 3, 64), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(1, inputs, width), (3, width, width), (1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, inputs, 4 * width))
            for k, c_in, c_out in convolutions:
                shapes += [(k, k, c_in, c_out), (c_out,), (c_out,)]
            inputs = 4 * width
    return shapes + [(2048, 1000), (1000,)]


def vgg16():
    """VGG-16 with one classifier layer, as it is used on 32 x 32 images: 14.7 million values."""
    shapes, inputs = [], 3
    for width in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(3, 3, inputs, width), (width,)]
        inputs = width
    return shapes + [(512, 10), (10,)]


SETS = {
    "20x1m": lambda: [(1_000_000,)] * 20,
    "20x100k": lambda: [(100_000,)] * 20,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "mlp": lambda: [(784, 1024), (1024,), (1024, 1024), (1024,), (1024, 10), (10,)],
}
"""Name to maker of a list of shapes. ``benchmarks/step.py`` calls them a to e, in this order."""
