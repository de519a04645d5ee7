"""Gradient compression for stock Horovod with TensorFlow and Keras.

    import horovod.tensorflow.keras as hvd, hvd_fec
    opt = hvd.DistributedOptimizer(opt, compression=hvd_fec.FEC())

The codecs, the cost model and the sharding need NumPy only. TensorFlow and Horovod are imported
when a compressor is first asked for, and the kernels when a codec is.
"""

from hvd_fec._version import __version__
from hvd_fec.wire import PayloadError

_NEED_NUMPY = ("codecs", "cost", "sharding")
_NEED_TENSORFLOW = ("FEC", "Ternary", "TwoBit", "Compression", "callbacks")

__all__ = ["PayloadError", "__version__", *_NEED_NUMPY, *_NEED_TENSORFLOW]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import hvd_fec.codecs
    import hvd_fec.cost
    import hvd_fec.sharding

    if name in _NEED_NUMPY:
        return globals()[name]
    try:
        import hvd_fec.callbacks
        import hvd_fec.compression
    except ImportError as error:
        raise ImportError(
            f"hvd_fec.{name} needs TensorFlow and Horovod built with TensorFlow support "
            f"(HOROVOD_WITH_TENSORFLOW=1), which could not be imported here: {error}"
        ) from error
    return hvd_fec.callbacks if name == "callbacks" else getattr(hvd_fec.compression, name)
