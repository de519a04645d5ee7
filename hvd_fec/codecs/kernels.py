"""The kernels in use: the compiled ones, or their NumPy twins where there is no extension.

``HVD_FEC_ISA`` chooses: ``numpy``, or one of the extension's instruction sets (``baseline``,
``avx2``, ``avx512``); unset means the best that runs here. Both write the same bytes.
"""

import os
import warnings

from hvd_fec.codecs import _numpy

INTERFACE = 2
"""Raised here and in ``_kernels.pyx`` with every change to a kernel's name, arguments or results,
so that an extension which was built from other sources is refused."""


def _choose():
    wanted = os.environ.get("HVD_FEC_ISA", "")
    if wanted == "numpy":
        return _numpy
    try:
        from hvd_fec._ext import _kernels
    except ImportError as error:
        if wanted:
            raise ImportError(f"HVD_FEC_ISA={wanted} needs the compiled extension") from error
        warnings.warn(
            f"hvd_fec runs on its NumPy kernels, many times slower, because the compiled extension "
            f"could not be loaded ({error}); reinstall hvd_fec with a C compiler present",
            RuntimeWarning,
            stacklevel=2,
        )
        return _numpy
    built = getattr(_kernels, "INTERFACE", 0)
    if built != INTERFACE:
        raise ImportError(
            f"the compiled extension {getattr(_kernels, '__file__', '')} was built from other "
            f"sources of hvd_fec (its interface is {built}, not {INTERFACE}): install hvd_fec "
            "again, pip install --force-reinstall --no-deps . in its source tree"
        )
    if wanted:
        if wanted not in _kernels.available():
            names = ", ".join(["numpy", *_kernels.available()])
            raise ValueError(f"HVD_FEC_ISA must be one of {names} here, not {wanted!r}")
        _kernels.use(wanted)
    return _kernels


active = _choose()
"""The module whose functions the codecs call."""
