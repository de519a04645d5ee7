"""Gradient compression for stock Horovod with TensorFlow and Keras.

    import horovod.tensorflow.keras as hvd, hvd_fec
    opt = hvd.DistributedOptimizer(opt, compression=hvd_fec.FEC())

The codecs, the cost model and the sharding need NumPy only. TensorFlow and Horovod are imported
when a compressor is first asked for, and the kernels when a codec is.
"""

from typing import TYPE_CHECKING, Any

from hvd_fec._version import __version__
from hvd_fec.wire import PayloadError

__all__ = [
    "FEC",
    "Compression",
    "PayloadError",
    "Ternary",
    "TwoBit",
    "__version__",
    "callbacks",
    "codecs",
    "cost",
    "sharding",
]

if TYPE_CHECKING:  # what __getattr__ below does, for those who only read
    from hvd_fec import callbacks, codecs, cost, sharding
    from hvd_fec.compression import FEC, Compression, Ternary, TwoBit


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import hvd_fec.codecs
    import hvd_fec.cost
    import hvd_fec.sharding

    if name in ("codecs", "cost", "sharding"):
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
