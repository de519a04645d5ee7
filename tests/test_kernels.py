"""Every compiled kernel, on every instruction set of this machine, against its NumPy twin.

Outputs lie between guard bytes, and every comparison is bit for bit.
"""

import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hvd_fec import PayloadError, wire
from hvd_fec.codecs import FecCodec, _numpy, fec
from hvd_fec.codecs.kernels import INTERFACE

try:
    from hvd_fec._ext import _kernels
except ImportError:
    _kernels = None

ISAS = _kernels.available() if _kernels else []
compiled = pytest.mark.skipif(_kernels is None, reason="the compiled extension is not there")

CHUNK = 32768
LENGTHS = range(258)
LONG = [k * CHUNK + d for k in (1, 2) for d in (-1, 0, 1)]
OFFSETS = range(16)  # elements: every position within the widest vector of float32
DTYPES = {1: np.float16, 2: ml_dtypes.bfloat16, 3: np.float32, 4: np.float64}
GUARD = 0xA5


@pytest.fixture(params=ISAS)
def kernels(request):
    """The extension, switched to one instruction set."""
    before = _kernels.isa()
    _kernels.use(request.param)
    yield _kernels
    _kernels.use(before)


def placed(array, offset):
    """A copy that starts ``offset`` elements behind a 64-byte boundary."""
    raw = np.empty(array.nbytes + 64 + offset * array.itemsize, np.uint8)
    start = -raw.ctypes.data % 64 + offset * array.itemsize
    copy = raw[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


class Guarded:
    """An output array between guard bytes."""

    def __init__(self, size, dtype=np.uint8, offset=0):
        self.raw = np.full(64 + size * np.dtype(dtype).itemsize + 64, GUARD, np.uint8)
        start = 16 + offset
        self.inside = slice(start, start + size * np.dtype(dtype).itemsize)
        self.array = self.raw[self.inside].view(dtype)

    def check(self):
        assert (self.raw[: self.inside.start] == GUARD).all(), "written before the buffer"
        assert (self.raw[self.inside.stop :] == GUARD).all(), "written behind the buffer"


def values(n, dtype, density, seed=0):
    """Finite values around threshold 0, with everything that is special among them."""
    rng = np.random.default_rng(seed)
    kept = rng.random(n) < density
    x = rng.choice([-1.0, 1.0], n) * 2.0 ** rng.uniform(0, 18, n)
    x[~kept] = rng.choice([-1.0, 1.0], n - kept.sum()) * 2.0 ** rng.uniform(-30, 0, n - kept.sum())
    special = [0.0, -0.0, 1.0, -1.0, np.nextafter(np.float32(1), np.float32(0)), 2.0, 1e-45, -1e-40,
               2.0**14, 2.0**15, 6e-8, -6e-5, 65504.0]  # fmt: skip
    special += [3e38, -3e38] if dtype != 1 else []
    if density == 1:
        special = [v for v in special if abs(v) >= 1]
    at = rng.random(n) < 0.2
    x[at] = rng.choice(special, at.sum())
    with np.errstate(over="ignore"):
        x = x.clip(-65504, 65504) if dtype == 1 else x
        x = x.astype(DTYPES[dtype])
    assert np.isfinite(x.astype(np.float32)).all()
    return x


def residuals(n, seed=1):
    x = values(n, 3, 0.3, seed)
    return np.where(abs(x) > 1e38, x, x * np.float32(0.5))


def encode(kernels, x, dtype, residual, threshold, offset=0):
    """(codes, signs, table, kept) with buffers of exactly the size that is promised."""
    n = x.size
    chunks = -(-n // CHUNK)
    codes = Guarded((n + 1) // 2, offset=offset)
    signs = Guarded(n // 8 + chunks, offset=offset)
    table = Guarded(2 * chunks, np.uint16)
    used = kernels.fec_encode(
        x.view(np.uint8), dtype, residual, 2.0**threshold, codes.array, signs.array, table.array
    )
    for buffer in codes, signs, table:
        buffer.check()
    assert 0 <= used[3] <= used[2]
    return codes.array[: used[0]], signs.array[: used[1]], table.array, used[2]


def as_bytes(result):
    return [part if isinstance(part, int) else part.tobytes() for part in result]


# ---- encode and decode --------------------------------------------------------------------------


@functools.lru_cache(None)
def encode_case(n, dtype, density, threshold):
    """Input, residual, and what the twin makes of them without and with the residual."""
    x, before = values(n, dtype, density, n), residuals(n)
    r = before.copy()
    plain = as_bytes(encode(_numpy, x, dtype, None, threshold))
    return x, before, plain, [*as_bytes(encode(_numpy, x, dtype, r, threshold)), r.tobytes()]


def check_encode(kernels, offsets, *case):
    """The kernel gives the twin's bytes and residual wherever its operands lie."""
    n, dtype, _, threshold = case
    x, before, plain, fed_back = encode_case(*case)
    for offset in offsets:
        shifted = placed(x, offset)
        assert as_bytes(encode(kernels, shifted, dtype, None, threshold, offset)) == plain
        r = Guarded(n, np.float32, 4 * (offset * 7 % 8))
        r.array[...] = before
        result = as_bytes(encode(kernels, shifted, dtype, r.array, threshold, offset))
        r.check()
        assert [*result, r.array.tobytes()] == fed_back, (n, offset)


@compiled
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode(kernels, dtype, density):
    every = dtype == 3 and density == 0.3  # elsewhere the offset changes with the length
    for n in LENGTHS:
        check_encode(kernels, OFFSETS if every else [n % 16], n, dtype, density, 0)


@compiled
@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_around_chunks(kernels, dtype, n):
    for density in 0.001, 0.02, 1.0:
        check_encode(kernels, [n % 16], n, dtype, density, 0)


@compiled
@pytest.mark.parametrize("threshold", [-126, -125, -24, 1, 112, 113])
def test_encode_at_other_thresholds(kernels, threshold):
    for dtype in DTYPES:
        for n in 257, 3000:
            check_encode(kernels, [1], n, dtype, 0.3, threshold)


@compiled
def test_encode_any_bits(kernels):
    """All float32 patterns that are finite, and residuals that are not even that."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    x[~np.isfinite(x)] = 0
    before = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    before[::5] = rng.choice(np.float32([np.inf, -np.inf, np.nan, -np.nan]), 20_000)
    for threshold in -126, -9, 113:
        r, r_twin = before.copy(), before.copy()
        result = as_bytes(encode(kernels, x, 3, r, threshold))
        assert result == as_bytes(encode(_numpy, x, 3, r_twin, threshold))
        assert r.tobytes() == r_twin.tobytes()
        assert np.isfinite(r).all()


@compiled
@pytest.mark.parametrize("threshold", [-125.9, -8.3, 0.5, 112.7])
def test_thresholds_between_octaves(kernels, threshold):
    for n in [1, 17, 2049, CHUNK + 5]:
        x = values(n, 3, 0.3, n).astype(np.float64) * 2.0**threshold
        x = np.clip(x, -3e38, 3e38).astype(np.float32)
        r, r_twin = x / 3, x / 3
        encoded = encode(kernels, x, 3, r, threshold)
        assert as_bytes(encoded) == as_bytes(encode(_numpy, x, 3, r_twin, threshold))
        assert r.tobytes() == r_twin.tobytes()
        out, out_twin = np.ones((2, n), np.float32)
        kernels.fec_decode_add(*encoded[:3], 2.0**threshold, 0.5, out)
        _numpy.fec_decode_add(*encoded[:3], 2.0**threshold, 0.5, out_twin)
        assert out.tobytes() == out_twin.tobytes()


@functools.lru_cache(None)
def decode_case(n, density):
    """What the twin encodes, an array, and the array after the twin added to it."""
    encoded = encode(_numpy, values(n, 3, density, n), 3, None, 0)
    before = residuals(n)
    before[::7] = -0.0
    expected = before.copy()
    _numpy.fec_decode_add(*encoded[:3], 1, 1 / 3, expected)
    return encoded, before, expected


@compiled
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_decode_add(kernels, density):
    for n in [*LENGTHS, *LONG]:
        (codes, signs, table, kept), before, expected = decode_case(n, density)
        assert kernels.fec_check(codes, signs, table, n) == (0, -(-n // CHUNK), kept)
        for offset in OFFSETS if density == 0.3 and n in LENGTHS else [n % 16]:
            out = Guarded(n, np.float32, 4 * (offset % 8))
            out.array[...] = before
            args = placed(codes, offset), placed(signs, offset), table, 1, 1 / 3, out.array
            kernels.fec_decode_add(*args)
            out.check()
            assert out.array.tobytes() == expected.tobytes(), (n, offset)


@compiled
@pytest.mark.parametrize("scale", [1.0, -2.5, 1e-40, 1e38, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("threshold", [-126, 0, 113])
def test_decode_add_scales(kernels, scale, threshold):
    codes, signs, table, _ = encode(_numpy, values(500, 3, 0.5), 3, None, threshold)
    out = values(500, 3, 0.5, 7)
    expected = out.copy()
    _numpy.fec_decode_add(codes, signs, table, 2.0**threshold, scale, expected)
    kernels.fec_decode_add(codes, signs, table, 2.0**threshold, scale, out)
    np.testing.assert_array_equal(out, expected)
    assert out.tobytes() == expected.tobytes() or np.isnan(scale)


def damaged(rng, codes, signs, table, n):
    """One of the things that can be wrong with a chunk, table included, or nothing at all."""
    codes, signs, table = codes.copy(), signs.copy(), table.copy()
    for stream, lengths in (codes, table[0::2]), (signs, table[1::2]):
        if stream.size and rng.random() < 0.7:
            stream[rng.integers(stream.size)] = rng.choice([0, 1, 16, 255, rng.integers(256)])
        if rng.random() < 0.2:
            lengths[rng.integers(lengths.size)] ^= rng.choice(np.uint16([1, 2, 255]))
    which = rng.integers(6)
    if which == 0:
        codes = codes[: rng.integers(codes.size + 1)]
    elif which == 1:
        codes = np.append(codes, rng.integers(0, 256, 3, np.uint8))
        table[-2] += 3
    elif which == 2:
        signs = np.append(signs, rng.integers(0, 256, 1, np.uint8))
        table[-1] += 1
    return codes, signs, table


@compiled
def test_check(kernels):
    rng = np.random.default_rng(0)
    seen = set()
    for n in [*LENGTHS[1:], *LONG]:
        for density in 0.02, 0.3, 1.0:
            sound = decode_case(n, density)[0][:3]
            for _ in range(2):
                codes, signs, table = damaged(rng, *sound, n)
                expected = _numpy.fec_check(codes, signs, table, n)
                offset = n % 16
                status = kernels.fec_check(placed(codes, offset), placed(signs, offset), table, n)
                assert status[:2] == expected[:2], (n, density)
                assert status[0] or status == expected
                seen.add(status[0])
    assert seen == set(range(10)), "a fault that this test does not produce"


@compiled
def test_check_of_nothing(kernels):
    some, nothing = np.zeros(1, np.uint8), np.zeros(0, np.uint8)
    no_table = np.zeros(0, np.uint16)
    assert kernels.fec_check(nothing, nothing, no_table, 0) == (0, 0, 0)
    for codes, signs in (some, nothing), (nothing, some):
        assert kernels.fec_check(codes, signs, no_table, 0)[0] == _numpy.LENGTHS
        assert _numpy.fec_check(codes, signs, no_table, 0)[0] == _numpy.LENGTHS


# ---- finiteness and runs ------------------------------------------------------------------------


def edges(dtype):
    """Bits of the largest magnitude that is finite, and of the smallest that is not."""
    integer = f"u{np.dtype(DTYPES[dtype]).itemsize}"
    if dtype == 4:  # where rounding to float32 turns to infinity
        limit = np.array([2.0**128 - 2.0**103])
        return np.nextafter(limit, 0).view(integer), limit.view(integer)
    infinity = np.array([np.inf], DTYPES[dtype]).view(integer)
    return infinity - np.ones(1, integer), infinity


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite(kernels, dtype):
    rng = np.random.default_rng(0)
    last, infinity = edges(dtype)
    sign = np.left_shift(np.ones_like(last), 8 * last.itemsize - 1)
    for n in [*LENGTHS, *LONG]:
        x = placed(values(n, dtype, 0.3, n), n % 16)
        raw, patterns = x.view(np.uint8), x.view(last.dtype)
        if n:
            patterns[rng.integers(n)] = last[0]
            patterns[rng.integers(n)] = (last | sign)[0]
        assert kernels.all_finite(raw, dtype) is _numpy.all_finite(raw, dtype) is True
        for at in {0, n - 1, *rng.integers(n, size=2)} if n else ():
            good = patterns[at]
            for bad in infinity, infinity | sign, ~sign, ~np.zeros_like(sign):
                patterns[at] = bad[0]
                assert kernels.all_finite(raw, dtype) is False, (n, at)
                assert n > 50 or _numpy.all_finite(raw, dtype) is False
            patterns[at] = good


@compiled
@pytest.mark.parametrize("density", [0.0, 0.004, 0.1, 0.45, 0.55, 1.0])
def test_runs(kernels, density):
    """Round trip, and the same stream as the twin; lengths around several tokens of 255."""
    rng = np.random.default_rng(0)
    for n in [*LENGTHS, 509, 510, 511, 512, 513, 765, 766, 1024, 4096]:
        for offset in OFFSETS if n % 16 == 3 else [n % 16]:
            plane = np.where(rng.random(n) < density, rng.integers(1, 256, n), 0).astype(np.uint8)
            expected, out = np.empty(n, np.uint8), Guarded(n, offset=offset)
            used = _numpy.pack_runs(plane, expected)
            assert kernels.pack_runs(placed(plane, offset), out.array) == used
            out.check()
            if used == n:
                continue  # then the stream is of no use
            stream = out.array[:used]
            assert stream.tobytes() == expected[:used].tobytes()
            back = Guarded(n, offset=15 - offset)
            assert kernels.unpack_runs(stream, back.array) == 0
            back.check()
            assert back.array.tobytes() == plane.tobytes()


RUNS = [0, 1, *range(253, 258), *range(508, 513), *range(763, 768)]


@compiled
def test_runs_of_exact_lengths(kernels):
    for run in RUNS:
        plane = np.uint8([7] + [0] * run + [9, 0, 0, 0])
        stream = bytes([0, 7] + [255] * (run // 255) + [run % 255, 9])
        out = Guarded(plane.size)
        used = kernels.pack_runs(plane, out.array)
        out.check()
        if used < plane.size:
            assert out.array[:used].tobytes() == stream
            back = np.empty_like(plane)
            assert kernels.unpack_runs(out.array[:used], back) == 0
            assert back.tobytes() == plane.tobytes()
        else:
            assert len(stream) >= plane.size


@compiled
@pytest.mark.parametrize("run", RUNS)
def test_code_runs_of_exact_lengths(kernels, run):
    """Among so many values that no kernel takes them one by one; in either nibble, and in both."""
    for nibbles in [0], [1], [0, 1]:
        plane = np.zeros((40, run + 1, 2), np.float32)
        plane[:, run, nibbles] = 1
        x = plane.reshape(-1)[: CHUNK - 1]
        result = as_bytes(encode(kernels, x, 3, None, 0))
        assert result == as_bytes(encode(_numpy, x, 3, None, 0))
        out = np.zeros(x.size, np.float32)
        codes, signs, table = (np.frombuffer(part, np.uint8) for part in result[:3])
        kernels.fec_decode_add(codes, signs, table.view(np.uint16), 1, 0.75, out)
        np.testing.assert_array_equal(out, x)


def length(dense, size):
    """Bytes of the stream for a plane of dense bytes that are set, zeros, and one more byte."""
    return 2 * dense + (size - dense - 1) // 255 + 2


def just_too_dense(size):
    """The densities around which that stream stops being shorter than the plane."""
    limit = next(dense for dense in range(size) if length(dense, size) >= size)
    assert 2 * limit + 2 < size, "the long run is what makes it too long"
    return limit - 1, limit, limit + 1


@compiled
@pytest.mark.parametrize("size", [2000, CHUNK // 8, CHUNK // 2])
def test_runs_where_the_stream_stops_being_shorter(kernels, size):
    for dense in just_too_dense(size):
        plane = np.zeros(size, np.uint8)
        plane[:dense] = plane[-1] = 5
        out, expected = Guarded(size), np.empty(size, np.uint8)
        used = kernels.pack_runs(plane, out.array)
        out.check()
        assert used == _numpy.pack_runs(plane, expected) == min(length(dense, size), size)
        assert used == size or out.array[:used].tobytes() == expected[:used].tobytes()


@compiled
@pytest.mark.parametrize("n", [4000, CHUNK])
def test_codes_where_the_stream_stops_being_shorter(kernels, n):
    for dense in just_too_dense(n // 2):
        x = np.zeros(n, np.float32)
        x[: 2 * dense : 2] = x[-1] = 1
        result = as_bytes(encode(kernels, x, 3, None, 0))
        assert result == as_bytes(encode(_numpy, x, 3, None, 0))
        assert len(result[0]) == min(length(dense, n // 2), n // 2)


@compiled
def test_signs_where_the_stream_stops_being_shorter(kernels):
    for dense in just_too_dense(CHUNK // 8):
        x = np.ones(CHUNK, np.float32)
        x[: 8 * dense] = x[-1] = -1
        result = as_bytes(encode(kernels, x, 3, None, 0))
        assert result == as_bytes(encode(_numpy, x, 3, None, 0))
        assert len(result[1]) == min(length(dense, CHUNK // 8), CHUNK // 8)


@compiled
def test_unpack_hostile_runs(kernels):
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(3000):
        stream = rng.choice(np.uint8([0, 1, 2, 5, 40, 254, 255]), rng.integers(0, 12))
        n = int(rng.integers(1, 600))
        plane, expected = Guarded(n), np.empty(n, np.uint8)
        status = _numpy.unpack_runs(stream, expected)
        assert kernels.unpack_runs(stream, plane.array) == status, (stream, n)
        plane.check()
        assert status or plane.array.tobytes() == expected.tobytes()
        seen.add(status)
    assert seen == {0, 1, 2}


# ---- the entry points ---------------------------------------------------------------------------


@compiled
def test_use():
    with pytest.raises(ValueError, match="instruction set 'mmx' is not one of .*'baseline'"):
        _kernels.use("mmx")
    assert _kernels.isa() in _kernels.available()
    assert _kernels.available()[-1] == "baseline"
    assert _kernels.CHUNK == _numpy.CHUNK == CHUNK


@compiled
def test_arguments_are_checked():
    x, r = np.zeros(40, np.uint8), np.zeros(10, np.float32)
    codes, signs, table = np.zeros(5, np.uint8), np.zeros(2, np.uint8), np.zeros(2, np.uint16)
    encode = _kernels.fec_encode
    encode(x, 3, r, 1, codes, signs, table)
    for dtype in 0, 5, -1, 255:
        with pytest.raises(ValueError, match="unknown dtype code"):
            encode(x, dtype, r, 1, codes, signs, table)
        with pytest.raises(ValueError, match="unknown dtype code"):
            _kernels.all_finite(x, dtype)
    with pytest.raises(ValueError, match="residual has 9 elements, x has 10"):
        encode(x, 3, r[:9], 1, codes, signs, table)
    for lowest in 2.0**-127, 2.0**114, -1.0, math.nan:
        with pytest.raises(ValueError, match="threshold .* is outside"):
            encode(x, 3, r, lowest, codes, signs, table)
    for buffers in (codes[:4], signs, table), (codes, signs[:1], table), (codes, signs, table[:1]):
        with pytest.raises(ValueError, match="too small"):
            encode(x, 3, r, 1, *buffers)
    with pytest.raises(ValueError, match="table entries for"):
        _kernels.fec_check(codes, signs, table, CHUNK + 1)
    with pytest.raises(ValueError, match="too small"):
        _kernels.pack_runs(codes, signs)
    with pytest.raises(ValueError):
        encode(x, 3, r.astype(np.float64), 1, codes, signs, table)


# ---- the choice ---------------------------------------------------------------------------------

NO_EXTENSION = "import sys; sys.modules['hvd_fec._ext._kernels'] = None; "
WHICH = "from hvd_fec.codecs.kernels import active; print(active.isa())"


def chosen(isa, code=WHICH):
    """What a new process prints that has HVD_FEC_ISA set."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HVD_FEC_ISA": isa},
        capture_output=True,
        text=True,
    )
    return result.stdout.strip() or result.stderr


@compiled
def test_the_variable_chooses():
    assert chosen("") == ISAS[0]
    for isa in [*ISAS, "numpy"]:
        assert chosen(isa) == isa
    assert "ValueError: HVD_FEC_ISA must be one of numpy, " in chosen("mmx")


def test_without_the_extension():
    assert chosen("numpy", NO_EXTENSION + WHICH) == "numpy"
    assert chosen("", NO_EXTENSION + WHICH) == "numpy"
    assert "RuntimeWarning: hvd_fec runs on its NumPy kernels" in chosen(
        "", NO_EXTENSION + "import hvd_fec.codecs"
    )
    assert "ImportError: HVD_FEC_ISA=baseline needs the compiled extension" in chosen(
        "baseline", NO_EXTENSION + WHICH
    )


# ---- no counter is 32 bits wide -----------------------------------------------------------------


@pytest.mark.parametrize("count", [2**31, 2**32, 2**40, 2**63, 2**64 - 1])
def test_huge_counts_are_refused_before_anything_is_allocated(count):
    """Sections that are right for the count modulo 2**32, and others: the true sizes must count."""
    for codes, signs, nonfinite in (0, 0, 0), (4, 1, 0), (100, 50, 30), (8, 0, 4):
        flags = 1 if nonfinite else 0
        header = wire.Header(fec.CODEC, 3, flags, 0, count, 0, (codes, signs, nonfinite))
        payload = np.zeros(header.nbytes, np.uint8)
        header.write(payload)
        with pytest.raises(PayloadError, match=str(4 * -(-count // CHUNK))):
            FecCodec().decode(payload)
        with pytest.raises(PayloadError):
            FecCodec().decode_add(payload, np.zeros(8, np.float32))
        # the bytes still are a payload as far as taking them apart goes
        parts = list(wire.split(np.tile(payload, 3)))
        assert [part.tobytes() for part in parts] == [payload.tobytes()] * 3


@pytest.mark.parametrize("section", [0, 1, 2])
@pytest.mark.parametrize("length", [2**31, 2**32, 2**63, 2**64 - 1])
def test_huge_sections_are_refused(section, length):
    sections = [0, 0, 0]
    sections[section] = length
    payload = np.zeros(200, np.uint8)
    wire.Header(fec.CODEC, 3, 0, 0, 0, 0, tuple(sections)).write(payload)
    for data in payload, payload[: wire.HEADER.size]:
        with pytest.raises(PayloadError, match=f"claims {length + wire.HEADER.size} bytes"):
            FecCodec().decode(data)


def address_space(nbytes):
    """nbytes of zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        area = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no address space of {nbytes} bytes: {error}")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)  # so that reading it is quick
    return area


@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="relies on memory that is not reserved")
def test_decode_beyond_2_to_32(monkeypatch):
    """A real payload for 2**32 + 2**20 elements, with the last one kept, into a sparse array."""
    monkeypatch.setattr(fec, "kernels", _kernels)
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", "1")  # all in one call of the kernel
    count = 2**32 + 2**20 + 5
    table = np.zeros((-(-count // CHUNK), 2), "<u2")
    table[-1] = 3, 1
    codes, signs = b"\0\0\1", b"\1"  # of the last chunk, which has 5 elements
    sections = table.nbytes + len(codes), len(signs), 0
    header = wire.Header(fec.CODEC, 3, 0, 0, count, 1, sections)
    payload = np.empty(header.nbytes, np.uint8)
    header.write(payload)
    payload[wire.HEADER.size :] = np.frombuffer(table.tobytes() + codes + signs, np.uint8)
    out = np.frombuffer(address_space(4 * count), np.float32)
    FecCodec().decode_add(payload, out)
    np.testing.assert_array_equal(out[-8:], [0] * 7 + [-np.float32(4 / 3)])
    assert out[count % 2**32 - 1] == 0


@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="relies on memory that is not reserved")
def test_encode_beyond_2_to_32(monkeypatch):
    """2**32 + 2**17 + 3 float16 values, all zero but the first and the last."""
    monkeypatch.setattr(fec, "kernels", _kernels)
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", "1")
    count = 2**32 + 2**17 + 3
    x = np.frombuffer(address_space(2 * count), np.float16)
    x[0], x[-1] = 1, -2
    payload = FecCodec(0).encode(x)
    header = wire.read_header(payload)
    assert (header.count, header.kept) == (count, 2)
    assert payload.size == wire.HEADER.size + sum(header.sections)
    table = payload[wire.HEADER.size :][: 4 * -(-count // CHUNK)].view("<u2").reshape(-1, 2)
    assert np.flatnonzero(table.any(1)).tolist() == [0, len(table) - 1]


# ---- denormals ----------------------------------------------------------------------------------

MXCSR_FLUSH = 0x8040  # flush-to-zero and denormals-are-zero


class FloatEnvironment:
    """glibc's fenv_t on x86-64, whose last field is the SSE control register."""

    def __init__(self):
        self.libm = ctypes.CDLL("libm.so.6")
        self.env = (ctypes.c_uint32 * 8)()

    def read(self):
        assert self.libm.fegetenv(self.env) == 0
        return self.env[7]

    def write(self, mxcsr):
        self.read()
        self.env[7] = mxcsr
        assert self.libm.fesetenv(self.env) == 0


@pytest.fixture
def flushing():
    """This thread flushes denormals to zero, as TensorFlow's threads do."""
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs x86-64 and glibc")
    environment = FloatEnvironment()
    before = environment.read()
    environment.write(before | MXCSR_FLUSH)
    yield environment
    environment.write(before)


TINY = np.uint32([1, 0x80000001, 0x007FFFFF, 0x00800000, 0x00000200]).view(np.float32)


def denormal_cases(kernels):
    """Bits of results in all of which denormals matter."""
    n = 9 * CHUNK  # enough for two threads
    x = np.zeros(n, np.float32)
    x[: TINY.size] = x[-TINY.size :] = TINY
    residual = np.zeros(n, np.float32)
    residual.view(np.uint32)[-TINY.size :] = 3
    results = [FecCodec(-126).encode(x, residual), residual]
    half = np.arange(1, 1024, dtype=np.uint16).view(np.float16)  # subnormals of float16
    results.append(FecCodec(-24).encode(half))
    double = np.ldexp(np.ones(20), -np.arange(130, 150))
    results.append(FecCodec(-126).encode(double, residual[:20]))
    payload = FecCodec(-126).encode(np.full(100, 2.0**-126, np.float32))
    out = np.full(100, 0x77, np.uint32).view(np.float32)
    FecCodec().decode_add(payload, out, 1e-3)
    return [array.tobytes() for array in [*results, residual, out]]


@compiled
@pytest.mark.parametrize("threads", ["1", "2"])
def test_denormals_are_kept_where_the_caller_flushes_them(kernels, threads, flushing, monkeypatch):
    monkeypatch.setattr(fec, "kernels", kernels)
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", threads)
    fec.threads._forget_pool()  # new threads inherit the mode of the one that starts them
    with np.errstate(all="ignore"):
        assert (TINY * np.float32(1))[0] == 0, "this thread was to flush denormals"
        flushed = denormal_cases(kernels)
    mode = flushing.read()
    assert mode & MXCSR_FLUSH == MXCSR_FLUSH, "a kernel did not put the caller's mode back"
    flushing.write(mode & ~MXCSR_FLUSH)
    fec.threads._forget_pool()
    assert flushed == denormal_cases(kernels)


def test_the_interface_has_its_number():
    """An extension of other sources is told by it: see ``hvd_fec/codecs/kernels.py``."""
    source = (Path(__file__).parents[1] / "hvd_fec/_ext/_kernels.pyx").read_text()
    signatures = re.findall(r"^def .*?\):$", source, re.MULTILINE | re.DOTALL)
    digest = hashlib.blake2b("".join("".join(signatures).split()).encode(), digest_size=8)
    assert (INTERFACE, digest.hexdigest()) == (2, "0ebeae43357e3478"), (
        "raise INTERFACE in kernels.py and _kernels.pyx, and note the new digest here"
    )
