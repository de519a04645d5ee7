"""Gradient compression for stock Horovod with TensorFlow and Keras.

    import horovod.tensorflow.keras as hvd, hvd_fec
    opt = hvd.DistributedOptimizer(opt, compression=hvd_fec.FEC())

The codecs and the sharding need NumPy only. TensorFlow and Horovod are imported when a compressor
is first asked for.
"""

import importlib

from hvd_fec import codecs
from hvd_fec._version import __version__
from hvd_fec.wire import PayloadError

_COMPRESSORS = ("FEC", "Ternary", "TwoBit", "Compression")

__all__ = ["PayloadError", "__version__", "codecs", *_COMPRESSORS]


def __getattr__(name):
    if name == "callbacks":
        return importlib.import_module("hvd_fec.callbacks")
    if name not in _COMPRESSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from hvd_fec import compression
    except ImportError as error:
        raise ImportError(
            f"hvd_fec.{name} needs TensorFlow and Horovod built with TensorFlow support "
            f"(HOROVOD_WITH_TENSORFLOW=1), which could not be imported here: {error}"
        ) from error
    return getattr(compression, name)
