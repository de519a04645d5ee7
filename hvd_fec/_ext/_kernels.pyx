# cython: language_level=3, boundscheck=False, wraparound=False
"""Typed entry points of the C kernels: check sizes, drop the GIL, call.

Tensors come in as their raw bytes plus a dtype code (see kernels.h), so that dtypes which do not
offer a buffer, such as bfloat16, need no special case. The NumPy twin of every function here is in
``hvd_fec/codecs/_numpy.py``.
"""
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from "kernels.h" nogil:
    enum: FEC_CHUNK
    enum: CODED_CHUNK
    enum: TERNARY_LANES
    enum: TERNARY_MAX_RANKS
    ctypedef struct ternary_radix:
        uint64_t digits
    ternary_radix ternary_radix_of(uint64_t)
    ctypedef struct fec_sizes:
        size_t codes
        size_t signs
        uint64_t kept
        uint64_t above
    ctypedef struct kernel_set:
        const char *name
        int (*all_finite)(const void *, int, size_t) noexcept nogil
        fec_sizes (*fec_encode)(const void *, int, float *, size_t, float, uint8_t *, uint8_t *,
                                uint16_t *) noexcept nogil
        int (*fec_check)(const uint8_t *, size_t, const uint8_t *, size_t, const uint16_t *,
                         size_t, size_t *, uint64_t *) noexcept nogil
        void (*fec_decode_add)(const uint8_t *, const uint8_t *, const uint16_t *, size_t, float,
                               float, float *) noexcept nogil
        size_t (*pack_runs)(const uint8_t *, size_t, uint8_t *) noexcept nogil
        int (*unpack_runs)(const uint8_t *, size_t, uint8_t *, size_t) noexcept nogil
        size_t (*coded_pack)(const uint8_t *, const uint8_t *, const uint16_t *, size_t, uint32_t *,
                             uint8_t *, uint8_t *, uint32_t *) noexcept nogil
        int (*coded_unpack)(const uint8_t *, size_t, const uint32_t *, size_t, uint32_t *,
                            uint32_t *, size_t *) noexcept nogil
        void (*coded_add)(const uint32_t *, const uint32_t *, size_t, float, float,
                          float *) noexcept nogil
        uint32_t (*ternary_survey)(const void *, int, const float *, size_t,
                                   double *) noexcept nogil
        uint64_t (*ternary_encode)(const void *, int, float *, size_t, float, float,
                                   const ternary_radix *, int64_t *) noexcept nogil
        uint64_t (*ternary_draw)(const void *, int, size_t, float, uint32_t, uint64_t,
                                 const ternary_radix *, int64_t *) noexcept nogil
        int (*ternary_decode)(const int64_t *, size_t, size_t, size_t, const ternary_radix *,
                              float, float *) noexcept nogil
    const kernel_set *kernels_available(size_t)
    unsigned kernels_enter()
    void kernels_leave(unsigned)

INTERFACE = 2
"""Number of this module's interface; ``hvd_fec/codecs/kernels.py`` says when it changes."""
CHUNK = FEC_CHUNK
CODED = CODED_CHUNK
LANES = TERNARY_LANES
MAX_RANKS = TERNARY_MAX_RANKS

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
    return n // FEC_CHUNK + (n % FEC_CHUNK != 0)


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


def fec_encode(const uint8_t[::1] x, int dtype, float[::1] residual, float lowest,
               uint8_t[::1] codes, uint8_t[::1] signs, uint16_t[::1] table):
    """Encode finite ``x`` into the buffers and update ``residual`` (or None) in place.

    Values from ``lowest`` up are kept. Returns (bytes of codes, bytes of signs, values kept, how
    many of these are above ``lowest`` by a quarter of its power of two). The buffers must hold the
    worst case:
    ceil(n / 2) codes, ceil(n / 8) + chunks signs, 2 table entries per chunk.
    """
    cdef size_t n = _elements(x, dtype)
    cdef fec_sizes sizes
    cdef float *r = NULL
    cdef unsigned mode
    if n == 0:
        return 0, 0, 0, 0
    if residual is not None:
        if <size_t>residual.shape[0] != n:
            raise ValueError(f"residual has {residual.shape[0]} elements, x has {n}")
        r = &residual[0]
    if not 2.0**-126 <= lowest <= 2.0**113:
        raise ValueError(f"threshold {lowest} is outside 2**-126..2**113")
    if (<size_t>codes.shape[0] < (n + 1) // 2 or <size_t>signs.shape[0] < n // 8 + _chunks(n)
            or <size_t>table.shape[0] < 2 * _chunks(n)):
        raise ValueError("output buffers are too small")
    with nogil:
        mode = kernels_enter()
        sizes = active.fec_encode(&x[0], dtype, r, n, lowest, &codes[0], &signs[0], &table[0])
        kernels_leave(mode)
    return sizes.codes, sizes.signs, sizes.kept, sizes.above


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
                   float lowest, float scale, float[::1] out):
    """out += scale * decoded. Only for sections that ``fec_check`` found sound for this ``n``."""
    cdef size_t n = out.shape[0]
    cdef unsigned mode
    if n == 0:
        return
    cdef const uint8_t *c = &codes[0] if codes.shape[0] else NULL
    cdef const uint8_t *s = &signs[0] if signs.shape[0] else NULL
    with nogil:
        mode = kernels_enter()
        active.fec_decode_add(c, s, &table[0], n, lowest, scale, &out[0])
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


cdef size_t _coded_chunks(size_t n):
    return n // CODED_CHUNK + (n % CODED_CHUNK != 0)


def coded_room(size_t n, size_t kept):
    """Bytes that ``coded_pack`` needs for n elements of which so many are kept.

    A subset of u elements takes below 1.6 u bits: one of n, up to 14 of those kept, and signs.
    """
    return n // 4 + 3 * kept + 64 * _coded_chunks(n)


def coded_pack(const uint8_t[::1] codes, const uint8_t[::1] signs, const uint16_t[::1] table,
               size_t n, size_t kept, uint8_t[::1] out, uint32_t[::1] out_table):
    """The sections that ``fec_encode`` wrote for n elements, ``kept`` of them kept, as coded
    streams; returns their bytes. ``out_table`` receives bytes and values kept of each chunk."""
    cdef size_t used, room = min(kept, <size_t>CODED_CHUNK) + 2
    cdef uint32_t *member
    if (<size_t>table.shape[0] != 2 * _chunks(n) or <size_t>out.shape[0] < coded_room(n, kept)
            or <size_t>out_table.shape[0] != 2 * _coded_chunks(n)):
        raise ValueError("buffers do not fit the elements")
    if n == 0:
        return 0
    cdef const uint8_t *c = &codes[0] if codes.shape[0] else NULL
    cdef const uint8_t *s = &signs[0] if signs.shape[0] else NULL
    member = <uint32_t *>malloc(room * (sizeof(uint32_t) + 1))
    if member == NULL:
        raise MemoryError()
    with nogil:
        used = active.coded_pack(c, s, &table[0], n, member, <uint8_t *>(member + room), &out[0],
                                 &out_table[0])
        free(member)
    return used


def coded_unpack(const uint8_t[::1] data, const uint32_t[::1] table, size_t n,
                 uint32_t[::1] entries):
    """(status, bad chunk) of coded streams of n elements; status 0 means sound.

    ``entries`` receives what is kept: position in its chunk, code from bit 20 on, sign in bit 24.
    """
    cdef size_t i, nbytes = 0, kept = 0, most = 1, bad = 0, length
    cdef size_t chunks = _coded_chunks(n)
    cdef int status
    cdef uint32_t *member
    if <size_t>table.shape[0] != 2 * chunks:
        raise ValueError(f"{table.shape[0]} table entries for {n} elements")
    for i in range(chunks):
        length = min(n - i * CODED_CHUNK, <size_t>CODED_CHUNK)
        if table[2 * i + 1] > length:
            raise ValueError(f"{table[2 * i + 1]} values kept of {length}")
        nbytes += table[2 * i]
        kept += table[2 * i + 1]
        most = max(most, <size_t>table[2 * i + 1])
    if nbytes != <size_t>data.shape[0] or kept != <size_t>entries.shape[0]:
        raise ValueError("the table does not fit the streams and the entries")
    if n == 0:
        return 0, 0
    cdef const uint8_t *d = &data[0] if nbytes else NULL
    cdef uint32_t *e = &entries[0] if kept else NULL
    member = <uint32_t *>malloc(most * sizeof(uint32_t))
    if member == NULL:
        raise MemoryError()
    with nogil:
        status = active.coded_unpack(d, nbytes, &table[0], n, member, e, &bad)
        free(member)
    return status, bad


def coded_add(const uint32_t[::1] entries, const uint32_t[::1] table, float lowest, float scale,
              float[::1] out):
    """out += scale * decoded. Only for entries that ``coded_unpack`` wrote for this size."""
    cdef size_t n = out.shape[0]
    cdef unsigned mode
    if n == 0 or entries.shape[0] == 0:
        return
    with nogil:
        mode = kernels_enter()
        active.coded_add(&entries[0], &table[0], n, lowest, scale, &out[0])
        kernels_leave(mode)


cdef ternary_radix _radix(uint64_t ranks, size_t n, size_t words) except *:
    if not 1 <= ranks <= TERNARY_MAX_RANKS:
        raise ValueError(f"{ranks} ranks are outside 1..{TERNARY_MAX_RANKS}")
    cdef ternary_radix radix = ternary_radix_of(ranks)
    if words != (n + radix.digits - 1) // radix.digits:
        raise ValueError(f"{words} words for {n} values of {ranks} ranks, {radix.digits} to a word")
    return radix


cdef const float *_residual(const float[::1] residual, size_t n) except? NULL:
    if residual is None:
        return NULL
    if <size_t>residual.shape[0] != n:
        raise ValueError(f"residual has {residual.shape[0]} elements, x has {n}")
    return &residual[0] if n else NULL


def ternary_survey(const uint8_t[::1] x, int dtype, const float[::1] residual, double[::1] squares):
    """The bits of the largest ``|x + residual|``, 0x7f800000 or more if one is not finite.

    ``squares`` receives the sum of squares of each chunk. ``residual`` may be None.
    """
    cdef size_t n = _elements(x, dtype)
    cdef const float *r = _residual(residual, n)
    cdef uint32_t peak
    cdef unsigned mode
    if <size_t>squares.shape[0] != _chunks(n):
        raise ValueError(f"{squares.shape[0]} sums for {_chunks(n)} chunks")
    if n == 0:
        return 0
    with nogil:
        mode = kernels_enter()
        peak = active.ternary_survey(&x[0], dtype, r, n, &squares[0])
        kernels_leave(mode)
    return peak


def ternary_encode(const uint8_t[::1] x, int dtype, float[::1] residual, float step, float level,
                   uint64_t ranks, int64_t[::1] words):
    """Pack t = sign(v) where ``|v| >= level``, v = x + residual; residual = v - t * step.

    ``x`` is finite, ``residual`` may be None. Returns how many t are not zero.
    """
    cdef size_t n = _elements(x, dtype)
    cdef ternary_radix radix = _radix(ranks, n, words.shape[0])
    cdef float *r = <float *>_residual(residual, n)
    cdef uint64_t kept
    cdef unsigned mode
    if n == 0:
        return 0
    with nogil:
        mode = kernels_enter()
        kept = active.ternary_encode(&x[0], dtype, r, n, step, level, &radix, &words[0])
        kernels_leave(mode)
    return kept


def ternary_draw(const uint8_t[::1] x, int dtype, float step, uint32_t first, uint64_t key,
                 uint64_t ranks, int64_t[::1] words):
    """Pack t = sign(x) with probability ``|x| / step``, drawn from ``key`` and the index of each
    element, which starts at ``first``. ``x`` is finite. Returns how many t are not zero."""
    cdef size_t n = _elements(x, dtype)
    cdef ternary_radix radix = _radix(ranks, n, words.shape[0])
    cdef uint64_t kept
    cdef unsigned mode
    if n == 0:
        return 0
    with nogil:
        mode = kernels_enter()
        kept = active.ternary_draw(&x[0], dtype, n, step, first, key, &radix, &words[0])
        kernels_leave(mode)
    return kept


def ternary_decode(const int64_t[:, :] words, uint64_t ranks, float scale, float[::1] out):
    """out = scale * sum of the digits of all rows of ``words``, each a sum over ``ranks`` ranks.

    Returns 0, or 1 for a word that is too large and 2 for a digit after the last value that is
    not zero; then ``out`` is meaningless.
    """
    cdef size_t n = out.shape[0], parts = words.shape[0]
    cdef ternary_radix radix = _radix(ranks, n, words.shape[1])
    cdef int status
    cdef unsigned mode
    if parts < 1 or parts * ranks > TERNARY_MAX_RANKS:
        raise ValueError(f"{parts} parts of {ranks} ranks are outside 1..{TERNARY_MAX_RANKS}")
    if n == 0:
        return 0
    if words.strides[1] != 8 or words.strides[0] % 8 or words.strides[0] < 0:
        raise ValueError("the rows of words must be contiguous")
    with nogil:
        mode = kernels_enter()
        status = active.ternary_decode(&words[0, 0], parts, words.strides[0] // 8, n, &radix, scale,
                                       &out[0])
        kernels_leave(mode)
    return status
