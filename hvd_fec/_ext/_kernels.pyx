# cython: language_level=3, boundscheck=False, wraparound=False
"""Typed entry points of the C kernels: check sizes, drop the GIL, call.

Tensors come in as their raw bytes plus a dtype code (see kernels.h), so that dtypes which do not
offer a buffer, such as bfloat16, need no special case. The NumPy twin of every function here is in
``hvd_fec/codecs/_numpy.py``.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint64_t

cdef extern from "kernels.h" nogil:
    enum: FEC_CHUNK
    ctypedef struct fec_sizes:
        size_t codes
        size_t signs
        uint64_t kept
    ctypedef struct kernel_set:
        const char *name
        int (*all_finite)(const void *, int, size_t) noexcept nogil
        fec_sizes (*fec_encode)(const void *, int, float *, size_t, int, uint8_t *, uint8_t *,
                                uint16_t *) noexcept nogil
        int (*fec_check)(const uint8_t *, size_t, const uint8_t *, size_t, const uint16_t *,
                         size_t, size_t *, uint64_t *) noexcept nogil
        void (*fec_decode_add)(const uint8_t *, const uint8_t *, const uint16_t *, size_t, int,
                               float, float *) noexcept nogil
        size_t (*pack_runs)(const uint8_t *, size_t, uint8_t *) noexcept nogil
        int (*unpack_runs)(const uint8_t *, size_t, uint8_t *, size_t) noexcept nogil
    const kernel_set *kernels_available(size_t)
    unsigned kernels_enter()
    void kernels_leave(unsigned)

CHUNK = FEC_CHUNK

cdef const kernel_set *active = kernels_available(0)
cdef int[5] ITEMSIZE = [0, 2, 2, 4, 8]


def available():
    """Names of the instruction sets this processor can run, best first."""
    names = []
    while kernels_available(len(names)) != NULL:
        names.append(kernels_available(len(names)).name.decode())
    return names


def isa():
    """Name of the instruction set in use."""
    return active.name.decode()


def use(str name):
    """Switch to the instruction set ``name``; ValueError when this processor lacks it."""
    global active
    names = available()
    if name not in names:
        raise ValueError(f"instruction set {name!r} is not one of {names}")
    active = kernels_available(names.index(name))


cdef size_t _elements(const uint8_t[::1] x, int dtype) except? 0:
    if not 1 <= dtype <= 4:
        raise ValueError(f"unknown dtype code {dtype}")
    return <size_t>x.shape[0] // ITEMSIZE[dtype]


cdef size_t _chunks(size_t n):
    return (n + FEC_CHUNK - 1) // FEC_CHUNK


def all_finite(const uint8_t[::1] x, int dtype):
    """True when every element is finite and, for float64, fits float32."""
    cdef size_t n = _elements(x, dtype)
    cdef int good
    cdef unsigned mode
    if n == 0:
        return True
    with nogil:
        mode = kernels_enter()
        good = active.all_finite(&x[0], dtype, n)
        kernels_leave(mode)
    return bool(good)


def fec_encode(const uint8_t[::1] x, int dtype, float[::1] residual, int threshold,
               uint8_t[::1] codes, uint8_t[::1] signs, uint16_t[::1] table):
    """Encode finite ``x`` into the buffers and update ``residual`` (or None) in place.

    Returns (bytes of codes, bytes of signs, values kept). The buffers must hold the worst case:
    ceil(n / 2) codes, ceil(n / 8) + chunks signs, 2 table entries per chunk.
    """
    cdef size_t n = _elements(x, dtype)
    cdef fec_sizes sizes
    cdef float *r = NULL
    cdef unsigned mode
    if n == 0:
        return 0, 0, 0
    if residual is not None:
        if <size_t>residual.shape[0] != n:
            raise ValueError(f"residual has {residual.shape[0]} elements, x has {n}")
        r = &residual[0]
    if not -126 <= threshold <= 113:
        raise ValueError(f"threshold {threshold} is outside -126..113")
    if (<size_t>codes.shape[0] < (n + 1) // 2 or <size_t>signs.shape[0] < n // 8 + _chunks(n)
            or <size_t>table.shape[0] < 2 * _chunks(n)):
        raise ValueError("output buffers are too small")
    with nogil:
        mode = kernels_enter()
        sizes = active.fec_encode(&x[0], dtype, r, n, threshold, &codes[0], &signs[0], &table[0])
        kernels_leave(mode)
    return sizes.codes, sizes.signs, sizes.kept


def fec_check(const uint8_t[::1] codes, const uint8_t[::1] signs, const uint16_t[::1] table,
              size_t n):
    """(status, bad chunk, values kept) of a payload's sections; status 0 means sound."""
    cdef size_t bad = 0, nc = codes.shape[0], ns = signs.shape[0]
    cdef uint64_t kept = 0
    cdef int status
    if <size_t>table.shape[0] != 2 * _chunks(n):
        raise ValueError(f"{table.shape[0]} table entries for {n} elements")
    cdef const uint8_t *c = &codes[0] if nc else NULL
    cdef const uint8_t *s = &signs[0] if ns else NULL
    if n == 0:
        return (9 if nc or ns else 0), 0, 0
    with nogil:
        status = active.fec_check(c, nc, s, ns, &table[0], n, &bad, &kept)
    return status, bad, kept


def fec_decode_add(const uint8_t[::1] codes, const uint8_t[::1] signs, const uint16_t[::1] table,
                   int threshold, float scale, float[::1] out):
    """out += scale * decoded. Only for sections that ``fec_check`` found sound for this ``n``."""
    cdef size_t n = out.shape[0]
    cdef unsigned mode
    if n == 0:
        return
    cdef const uint8_t *c = &codes[0] if codes.shape[0] else NULL
    cdef const uint8_t *s = &signs[0] if signs.shape[0] else NULL
    with nogil:
        mode = kernels_enter()
        active.fec_decode_add(c, s, &table[0], n, threshold, scale, &out[0])
        kernels_leave(mode)


def pack_runs(const uint8_t[::1] plane, uint8_t[::1] out):
    """Write the plane's zero-run stream to ``out``; returns its length, or the plane's length
    when the stream would not be shorter (then ``out`` holds nothing of use)."""
    cdef size_t n = plane.shape[0], used
    if <size_t>out.shape[0] < n:
        raise ValueError("output buffer is too small")
    if n == 0:
        return 0
    with nogil:
        used = active.pack_runs(&plane[0], n, &out[0])
    return used


def unpack_runs(const uint8_t[::1] stream, uint8_t[::1] plane):
    """Inverse of ``pack_runs``: 0, or 1 for an overrun, 2 for a zero literal or trailing run."""
    cdef size_t n = plane.shape[0], m = stream.shape[0]
    cdef int status
    if n == 0:
        return 1 if m else 0
    cdef const uint8_t *s = &stream[0] if m else NULL
    with nogil:
        status = active.unpack_runs(s, m, &plane[0], n)
    return status
