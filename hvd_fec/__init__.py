"""Gradient compression for stock Horovod with TensorFlow and Keras.

    import horovod.tensorflow.keras as hvd, hvd_fec
    opt = hvd.DistributedOptimizer(opt, compression=hvd_fec.FEC())

The codecs, the cost model and the sharding need NumPy only. TensorFlow and Horovod are imported
when a compressor is first asked for.
"""

from hvd_fec import codecs, cost, sharding
from hvd_fec._version import __version__
from hvd_fec.wire import PayloadError

_NEED_TENSORFLOW = ("FEC", "Ternary", "TwoBit", "Compression", "callbacks")

__all__ = ["PayloadError", "__version__", "codecs", "cost", "sharding", *_NEED_TENSORFLOW]


def __getattr__(name):
    if name not in _NEED_TENSORFLOW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import hvd_fec.callbacks
        import hvd_fec.compression
    except ImportError as error:
        raise ImportError(
            f"hvd_fec.{name} needs TensorFlow and Horovod built with TensorFlow support "
            f"(HOROVOD_WITH_TENSORFLOW=1), which could not be imported here: {error}"
        ) from error
    return hvd_fec.callbacks if name == "callbacks" else getattr(hvd_fec.compression, name)
