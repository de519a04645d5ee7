"""FecCodec: what is kept, what it decodes to, what stays in the residual, and to which bytes.

The codec is held against a scalar reference written from docs/wire-format.md, with Python's own
arithmetic, that shares no code with the package.
"""

import math
import re
import struct
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_fec import PayloadError, wire
from hvd_fec.codecs import FecCodec, _numpy, fec
from hvd_fec.codecs.arrays import ranges

try:
    from hvd_fec._ext import _kernels
except ImportError:
    _kernels = None

CHUNK = 32768
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
FACTOR = np.float32(4 / 3)
MAX = np.finfo(np.float32).max


def f32(*values):
    return np.array(values, np.float32)


def bits(array):
    """The array's bits, to compare what == does not tell apart."""
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def assert_same_bits(actual, desired):
    np.testing.assert_array_equal(bits(actual), bits(desired))


def gaussian(n, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32) * np.float32(scale)


# ---- the reference ------------------------------------------------------------------------------


def reference_code(v: float, t: int) -> int:
    if abs(v) < 2.0**t:
        return 0
    octave = math.frexp(abs(v))[1] - 1  # 2**octave <= |v| < 2**(octave + 1)
    return min(octave - t + 1, 15)


def reference_value(v: float, t: int) -> float:
    code = reference_code(v, t)
    return math.copysign(float(FACTOR) * 2.0 ** (t + code - 1), v) if code else 0.0


def reference_plane(stream: bytes, size: int) -> bytes:
    assert len(stream) <= size
    if len(stream) == size:
        return stream
    plane, tokens = b"", iter(stream)
    for run in tokens:
        plane += bytes(run) + (bytes([next(tokens)]) if run < 255 else b"")
    return plane + bytes(size - len(plane))


def reference_decode(payload: bytes) -> list:
    magic, version, codec, _, flags, t, count, kept, *sections = struct.unpack_from(
        "<4s4Bh6x5Q", payload
    )
    assert (magic, version, codec) == (b"HFEC", 1, 1)
    assert len(payload) == 56 + sum(sections)
    chunks = -(-count // CHUNK)
    table = struct.unpack_from(f"<{2 * chunks}H", payload, 56)
    codes_at, signs_at = 56 + 4 * chunks, 56 + sections[0]
    values = []
    for i in range(chunks):
        n = min(CHUNK, count - i * CHUNK)
        codes_end, signs_end = codes_at + table[2 * i], signs_at + table[2 * i + 1]
        plane = reference_plane(payload[codes_at:codes_end], -(-n // 2))
        codes = [nibble for byte in plane for nibble in (byte & 15, byte >> 4)]
        assert not any(codes[n:])
        k = sum(code > 0 for code in codes)
        plane = reference_plane(payload[signs_at:signs_end], -(-k // 8))
        signs = iter([byte >> j & 1 for byte in plane for j in range(8)])
        for code in codes[:n]:
            value = float(FACTOR) * 2.0 ** (t + code - 1) if code else 0.0
            values.append(-value if code and next(signs) else value)
        assert not any(signs)
        codes_at, signs_at = codes_end, signs_end
    assert (codes_at, signs_at) == (56 + sections[0], 56 + sections[0] + sections[1])
    assert kept == sum(value != 0 for value in values)
    if flags & 1:
        plane = reference_plane(payload[signs_at:], -(-count // 8))
        for i in range(count):
            if plane[i // 8] >> i % 8 & 1:
                values[i] = math.nan
    return values


# ---- golden bytes -------------------------------------------------------------------------------


def sparse(n, **values):
    """n zeros with values at some indices: sparse(9, _3=1.0)."""
    x = np.zeros(n, np.float32)
    for index, value in values.items():
        x[int(index[1:])] = value
    return x


def header(dtype=3, flags=0, threshold=0, count=0, kept=0, sections=(0, 0, 0)):
    """A payload's header in hex, so that a golden shows only what is not obvious."""
    return struct.pack(
        "<4s4Bh6x5Q", b"HFEC", 1, 1, dtype, flags, threshold, count, kept, *sections
    ).hex()


# name: (threshold, x, payload in hex)
GOLDEN = {
    # The example of docs/wire-format.md, in full.
    "worked example": (
        -2,
        sparse(21, _3=0.25, _8=-1.5, _9=0.75, _20=-1e6),
        "48464543 01 01 03 00 feff 000000000000 1500000000000000 0400000000000000"
        "0a00000000000000 0100000000000000 0000000000000000 0600 0100 0110 0223 050f 0a",
    ),
    "raw planes": (
        -2,
        f32(1, -2, 4, 0.5, -0.25),
        header(threshold=-2, count=5, kept=5, sections=(7, 1, 0)) + "0300 0100 432501 12",
    ),
    # 999 zero bytes = 3 * 255 + 234
    "long run": (
        0,
        sparse(2000, _1998=1, _1999=-1),
        header(count=2000, kept=2, sections=(9, 1, 0)) + "0500 0100 ffffff ea11 02",
    ),
    "run of 254": (
        0,
        sparse(1024, _508=1),
        header(count=1024, kept=1, sections=(6, 0, 0)) + "0200 0000 fe01",
    ),
    "run of 255": (
        0,
        sparse(1024, _510=1),
        header(count=1024, kept=1, sections=(7, 0, 0)) + "0300 0000 ff0001",
    ),
    "run of 256": (
        0,
        sparse(1024, _512=1),
        header(count=1024, kept=1, sections=(7, 0, 0)) + "0300 0000 ff0101",
    ),
    "nothing kept": (
        0,
        np.full(1000, 0.9, np.float32),
        header(count=1000, sections=(4, 0, 0)) + "0000 0000",
    ),
    # 40 sign bits: 4 zero bytes, then the last bit
    "signs in a run": (
        0,
        np.where(np.arange(40) == 39, -1, 1).astype(np.float32),
        header(count=40, kept=40, sections=(24, 2, 0)) + "1400 0200" + "11" * 20 + "0480",
    ),
    "no sign negative": (
        0,
        np.ones(40, np.float32),
        header(count=40, kept=40, sections=(24, 0, 0)) + "1400 0000" + "11" * 20,
    ),
    "two chunks": (
        0,
        sparse(32769, _0=1, _32768=-1),
        header(count=32769, kept=2, sections=(11, 1, 0)) + "0200 0000 0100 0100 0001 01 01",
    ),
    "non-finite": (
        0,
        sparse(20, _2=np.nan, _3=np.inf, _4=-2, _19=-np.inf),
        header(flags=1, count=20, kept=1, sections=(6, 1, 3)) + "0200 0100 0202 01 0c0008",
    ),
    "non-finite in a run": (
        0,
        sparse(64, _56=1, _57=np.nan),
        header(flags=1, count=64, kept=1, sections=(6, 0, 2)) + "0200 0000 1c01 0702",
    ),
    # 8 * 254 positive values, then a negative one; and the same for NaN and one byte more
    "signs in a run of 254": (
        0,
        np.where(np.arange(2040) == 2032, -1, 1).astype(np.float32),
        header(count=2040, kept=2040, sections=(1024, 2, 0)) + "fc03 0200" + "11" * 1020 + "fe01",
    ),
    "non-finite in a run of 255": (
        0,
        sparse(2049, _2040=np.inf),
        header(flags=1, count=2049, sections=(4, 0, 3)) + "0000 0000 ff0001",
    ),
    "empty": (-2, f32(), header(threshold=-2)),
    **{
        dtype: (
            -9,
            np.array([1, -3], DTYPES[dtype]),
            header(code, threshold=-9, count=2, kept=2, sections=(5, 1, 0)) + "0100 0100 ba 02",
        )
        for dtype, code in [("float16", 1), ("bfloat16", 2), ("float32", 3), ("float64", 4)]
    },
}


@pytest.mark.parametrize("threshold, x, payload", GOLDEN.values(), ids=GOLDEN)
def test_golden(threshold, x, payload):
    payload = bytes.fromhex(payload)
    assert FecCodec(threshold).encode(x).tobytes().hex() == payload.hex()
    values = [
        reference_value(v, threshold) if math.isfinite(v) else math.nan for v in x.astype(float)
    ]
    np.testing.assert_array_equal(FecCodec().decode(payload), f32(*values))
    np.testing.assert_array_equal(reference_decode(payload), values)


DOC = Path(__file__).parents[1] / "docs" / "wire-format.md"


def test_worked_example_of_the_documentation():
    example = DOC.read_text().split("### Worked example")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", example, re.S)
    scope = {"np": np, "FecCodec": FecCodec}
    exec(code, scope)
    documented = "".join(re.findall(r"^\| `([0-9a-f ]+)` \|", example, re.M)).replace(" ", "")
    assert scope["payload"].tobytes().hex() == documented
    assert f"The payload has {len(documented) // 2} bytes" in example

    threshold, x, golden = GOLDEN["worked example"]
    assert documented == golden.replace(" ", "")
    assert_same_bits(scope["x"], x)
    decoded = FecCodec().decode(bytes.fromhex(documented))
    listed = re.search(r"They decode to (.*) and (.*), in float32", example).groups()
    assert_same_bits(decoded[decoded != 0], f32(*", ".join(listed).split(", ")))


# ---- what is kept, and as what ------------------------------------------------------------------


@pytest.mark.parametrize("t", [-126, -125, -9, 0, 1, 113])
@pytest.mark.parametrize("sign", [1, -1])
def test_boundaries_of_every_octave(t, sign):
    """Each power of two, the float32 below it and the one above it."""
    edges = np.ldexp(np.float32(1), np.arange(t, min(t + 18, 128))).astype(np.float32)
    x = np.concatenate([np.nextafter(edges, f32(0)), edges, np.nextafter(edges, f32(np.inf))])
    assert np.isfinite(x).all()
    codes = np.arange(1, edges.size + 1)
    codes = np.concatenate([codes - 1, codes, codes]).clip(0, 15)
    expected = np.where(codes, np.ldexp(FACTOR, t + codes - 1), 0).astype(np.float32)
    decoded = FecCodec(t).decode(FecCodec(t).encode(sign * x))
    np.testing.assert_array_equal(decoded, sign * expected)


def test_decoded_values_are_four_thirds_to_the_bit():
    t = -9
    x = np.ldexp(f32(1.7), np.arange(t, t + 15))
    decoded = FecCodec(t).decode(FecCodec(t).encode(x))
    assert_same_bits(decoded, FACTOR * np.ldexp(f32(1), np.arange(t, t + 15)))
    assert bits(FACTOR) == 0x3FAAAAAB
    np.testing.assert_array_less(abs(decoded / x.astype(float) - 1), 1 / 3 + 1e-7)


@pytest.mark.parametrize("x", [1e30, float(MAX)])
def test_saturation(x):
    residual = f32(0, 0)
    decoded = FecCodec(-9).decode(FecCodec(-9).encode(f32(x, -x), residual))
    top = FACTOR * np.float32(2**5)
    np.testing.assert_array_equal(decoded, [top, -top])
    np.testing.assert_array_equal(residual, f32(x, -x) - decoded)


@given(
    arrays(np.uint32, st.integers(0, 300)),
    st.integers(-126, 113),
    st.sampled_from(list(DTYPES)),
)
@settings(deadline=None)
def test_any_bits_against_the_reference(x_bits, t, dtype):
    """Every float32 pattern, and what becomes of it in the other dtypes."""
    with np.errstate(all="ignore"):
        x = x_bits.view(np.float32).astype(DTYPES[dtype])
        exact = x.astype(np.float64)
    payload = FecCodec(t).encode(x)
    expected = [reference_value(v, t) if math.isfinite(v) else math.nan for v in exact]
    np.testing.assert_array_equal(FecCodec().decode(payload), f32(*expected))
    np.testing.assert_array_equal(reference_decode(payload.tobytes()), expected)
    assert wire.read_header(payload).dtype == wire.DTYPES[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("t", [-126, -24, -14, -9, 0, 15])
def test_every_half_precision_value(dtype, t):
    """All 65,536 bit patterns, subnormals, NaNs and infinities among them."""
    x = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    with np.errstate(all="ignore"):
        values = x.astype(np.float64)
    expected = [reference_value(v, t) if math.isfinite(v) else math.nan for v in values]
    np.testing.assert_array_equal(FecCodec().decode(FecCodec(t).encode(x)), f32(*expected))


def test_float64_is_rounded_to_float32_first():
    below = np.nextafter(0.125, 0)  # rounds to 0.125
    half_way = float(MAX) + 2.0**103  # the first float64 that rounds to infinity
    x = np.array([below, 0.125 - 2.0**-27, np.nextafter(half_way, 0), -half_way, 1e308, 1e-320])
    residual = np.zeros(x.size, np.float32)
    decoded = FecCodec(-3).decode(FecCodec(-3).encode(x, residual))
    np.testing.assert_array_equal(decoded, f32(FACTOR / 8, 0, FACTOR * 2**11, np.nan, np.nan, 0))
    np.testing.assert_array_equal(residual, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_give_the_same_streams(dtype):
    x = np.random.default_rng(1).integers(-128, 128, 5000).astype(DTYPES[dtype])
    payload = FecCodec(3).encode(x)
    expected = FecCodec(3).encode(x.astype(np.float32))
    expected[6] = payload[6]
    np.testing.assert_array_equal(payload, expected)


def test_zeros_and_subnormals_are_not_kept():
    x = f32(0.0, -0.0, 1e-45, -1e-45, np.nextafter(f32(2**-126), f32(0))[0])
    residual = np.zeros_like(x)
    payload = FecCodec(-126).encode(x, residual)
    assert wire.read_header(payload).kept == 0
    assert_same_bits(FecCodec().decode(payload), np.zeros(5, np.float32))
    # -0.0 + 0.0 is 0.0, as in IEEE 754; the subnormals stay to the last bit
    assert_same_bits(residual, f32(0, 0, *x[2:]))
    FecCodec(-126).encode(f32(-0.0), r := f32(-0.0))
    assert_same_bits(r, f32(-0.0))


# ---- shapes and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        np.arange(-60, 60, dtype=np.float32).reshape(4, 5, 6).transpose(2, 0, 1),
        np.arange(-60, 60, dtype=np.float32)[::-3],
        np.asfortranarray(np.arange(-60, 60, dtype=np.float64).reshape(10, 12)),
        np.broadcast_to(f32(7), (3, 5)),
        np.arange(-60, 60).astype(ml_dtypes.bfloat16).reshape(10, 12)[1::2, ::5],
        np.frombuffer(b"\0" + np.arange(9, dtype=np.float32).tobytes(), np.float32, offset=1),
        np.float32(-3),
        np.array(5.0),
        np.zeros((3, 0, 2), np.float16),
    ],
    ids="transposed reversed fortran broadcast bfloat16 unaligned scalar 0-d empty".split(),
)
def test_any_layout_is_encoded_in_c_order(x):
    flat = np.array(x, order="C").reshape(-1)
    payload = FecCodec(2).encode(x)
    np.testing.assert_array_equal(payload, FecCodec(2).encode(flat))
    expected = [reference_value(v, 2) for v in flat.astype(np.float64)]
    np.testing.assert_array_equal(FecCodec().decode(payload), f32(*expected))
    residual = np.zeros(x.shape, np.float32)
    np.testing.assert_array_equal(FecCodec(2).encode(x, residual), payload)
    np.testing.assert_array_equal(residual.reshape(-1), flat.astype(np.float32) - f32(*expected))


def test_readonly_input():
    x = gaussian(100)
    x.flags.writeable = False
    FecCodec().encode(x)


SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 255, 257, 2047, 2049]
SIZES += [k * CHUNK + d for k in (1, 2, 8) for d in (-1, 0, 1)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(n, dtype):
    x = gaussian(n, seed=n).astype(DTYPES[dtype])
    residual = gaussian(n, seed=n + 1, scale=0.1)
    s = x.astype(np.float32) + residual
    payload = FecCodec(1).encode(x, residual)
    header = wire.read_header(payload)
    assert (header.count, header.kept) == (n, np.count_nonzero(abs(s) >= 2))
    expected = np.where(abs(s) >= 4, 4 * FACTOR, np.where(abs(s) >= 2, 2 * FACTOR, 0))
    expected = np.copysign(expected, s).astype(np.float32)
    decoded = FecCodec().decode(payload)
    assert decoded.shape == (n,) and decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(residual, s - expected)


# ---- the residual -------------------------------------------------------------------------------

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def ulp(v: float) -> Fraction:
    """The distance of the float32 values around v."""
    return Fraction(2) ** max(math.frexp(v)[1] - 24, -149)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=40), st.integers(-126, 113))
@settings(deadline=None)
def test_identity_of_error_feedback(pairs, t):
    """decoded + r_new = x + r_old up to rounding, in exact arithmetic.

    With s = x + r_old in float32: what is kept below the end of the top octave, and what is not
    kept, loses nothing after that one rounding. A larger s leaves s - decoded, rounded once more.
    """
    x, r_old = (f32(*column) for column in zip(*pairs))
    r_new = r_old.copy()
    decoded = FecCodec(t).decode(FecCodec(t).encode(x, r_new))
    with np.errstate(over="ignore"):
        s = (x + r_old).clip(-MAX, MAX)
    for x_i, old, s_i, d, new in zip(*(a.astype(float) for a in (x, r_old, s, decoded, r_new))):
        error = Fraction(d) + Fraction(new) - Fraction(s_i)
        if abs(s_i) < 2.0 ** (t + 15):
            assert error == 0
        else:
            assert abs(error) <= ulp(new) / 2
        if abs(s_i) < MAX:  # else the sum saturated
            total = abs(Fraction(d) + Fraction(new) - Fraction(x_i) - Fraction(old))
            assert total <= ulp(s_i)


def test_identity_against_float64():
    x, r_old = gaussian(200_000), gaussian(200_000, seed=1, scale=2.0**-6)
    r_new = r_old.copy()
    decoded = FecCodec(-6).decode(FecCodec(-6).encode(x, r_new))
    left = decoded.astype(np.float64) + r_new
    exact = x.astype(np.float64) + r_old
    np.testing.assert_array_equal(left.astype(np.float32), exact.astype(np.float32))
    assert (abs(left - exact) <= np.spacing(abs(x + r_old)) / 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_encoding_sends_the_sum_of_the_inputs(dtype):
    """Below the threshold nothing is lost, it waits in the residual."""
    steps, n = 50, 1000
    residual = np.zeros(n, np.float32)
    sent = np.zeros(n)
    given_ = np.zeros(n)
    codec = FecCodec(0)
    for step in range(steps):
        x = gaussian(n, seed=step, scale=0.2).astype(DTYPES[dtype])
        sent += codec.decode(codec.encode(x, residual))
        given_ += x.astype(np.float64)
        assert abs(residual).max() < 1  # never as large as what would be kept
    assert np.count_nonzero(sent) > n / 4
    np.testing.assert_allclose(sent + residual, given_, rtol=0, atol=steps * 2.0**-24)


def test_sum_beyond_float32_saturates():
    x, residual = f32(MAX, -MAX, MAX), f32(MAX, -MAX, -MAX)
    decoded = FecCodec(113).decode(FecCodec(113).encode(x, residual))
    top = FACTOR * np.float32(2.0**127)
    np.testing.assert_array_equal(decoded, [top, -top, 0])
    np.testing.assert_array_equal(residual, [MAX - top, top - MAX, 0])


def test_residual_becomes_finite_again():
    """The codec never leaves a non-finite residual, not even if it was handed one."""
    residual = f32(np.inf, -np.inf, np.nan, 1)
    FecCodec(0).encode(f32(1, 1, 1, 1), residual)
    assert np.isfinite(residual).all()


def test_residual_may_have_any_shape():
    residual = np.zeros((2, 3), np.float32)
    FecCodec(0).encode(np.full((3, 2), 0.5), residual)
    np.testing.assert_array_equal(residual, np.full((2, 3), 0.5))


# ---- non-finite input ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 8, 1000, CHUNK + 1, 5 * CHUNK])
def test_nonfinite(n, dtype):
    x = gaussian(n).astype(DTYPES[dtype])
    x[:: n // 7 + 1] = np.nan
    x[n // 2] = np.inf
    x[-1] = -np.inf
    values = x.astype(np.float64)
    bad = ~np.isfinite(values)
    residual = gaussian(n, seed=1)
    before = residual.copy()
    payload = FecCodec(0).encode(x, residual)
    assert wire.read_header(payload).flags == wire.NONFINITE
    assert wire.read_header(payload).dtype == wire.DTYPES[dtype]
    assert_same_bits(residual, before)
    expected = np.where(bad, 0, values).astype(np.float32)
    expected = FecCodec(0).decode(FecCodec(0).encode(expected))
    expected[bad] = np.nan
    np.testing.assert_array_equal(FecCodec().decode(payload), expected)

    out = gaussian(n, seed=2)
    expected = np.where(expected == 0, out, out + np.float32(0.5) * expected)
    FecCodec().decode_add(payload, out, 0.5)
    np.testing.assert_array_equal(out, expected)


def test_finite_input_has_no_flag():
    assert wire.read_header(FecCodec().encode(f32(MAX, -MAX))).flags == 0
    largest = np.array([65504, -65504], np.float16)
    assert wire.read_header(FecCodec().encode(largest)).flags == 0


@pytest.mark.parametrize(
    "signalling",
    [
        np.array([0x7C01], np.uint16).view(np.float16),
        np.array([0x7F81], np.uint16).view(ml_dtypes.bfloat16),
        np.array([0x7F800001], np.uint32).view(np.float32),
        np.array([0x7FF0000000000001], np.uint64).view(np.float64),
    ],
    ids=DTYPES,
)
@pytest.mark.filterwarnings("error")
def test_signalling_nan(signalling):
    assert np.isnan(FecCodec().decode(FecCodec().encode(signalling))).all()


@pytest.mark.parametrize("at", [0, 1, 4 * CHUNK - 1, 4 * CHUNK, 8 * CHUNK + 6])
def test_one_nan_anywhere(at, monkeypatch):
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", "2")
    x = np.zeros(8 * CHUNK + 7, np.float32)
    x[at] = np.nan
    assert np.flatnonzero(np.isnan(FecCodec().decode(FecCodec().encode(x)))).tolist() == [at]


# ---- decode_add ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.5, -1.0, 1 / 3, 1e-40, 0.0])
@pytest.mark.parametrize("t", [1, -126])
def test_decode_add_scales_in_float32(scale, t):
    x = np.ldexp(gaussian(3000), t).astype(np.float32)
    payload = FecCodec(t).encode(x)
    decoded = FecCodec().decode(payload)
    out = gaussian(3000, seed=5)
    expected = np.where(decoded != 0, out + decoded * np.float32(scale), out)
    assert FecCodec().decode_add(payload, out, scale) is None
    assert_same_bits(out, expected)


@pytest.mark.parametrize("special", [-0.0, np.nan, np.inf, 1e-45])
def test_decode_add_touches_only_what_was_kept(special):
    x = gaussian(5000)
    out = np.full(5000, special, np.float32)
    out.view(np.uint32)[:] += np.uint32(np.isnan(special))  # a NaN that arithmetic would not make
    before = out.copy()
    FecCodec().decode_add(FecCodec(1).encode(x), out)
    assert_same_bits(out[abs(x) < 2], before[abs(x) < 2])
    assert (bits(out) != bits(before))[abs(x) >= 2].any() or not np.isfinite(special)


@pytest.mark.filterwarnings("error")
def test_decode_add_may_overflow():
    payload = FecCodec(113).encode(f32(MAX, -MAX, 0))
    out = f32(MAX, -MAX, MAX)
    FecCodec().decode_add(payload, out)
    np.testing.assert_array_equal(out, [np.inf, -np.inf, MAX])
    FecCodec().decode_add(payload, out := f32(0, 0, 0), 1e300)
    np.testing.assert_array_equal(out, [np.inf, -np.inf, 0])


def test_decode_add_into_a_shape():
    x = gaussian(12).reshape(3, 4)
    out = np.zeros((3, 4), np.float32)
    FecCodec().decode_add(FecCodec(0).encode(x), out)
    np.testing.assert_array_equal(out.ravel(), FecCodec().decode(FecCodec(0).encode(x)))


@pytest.mark.parametrize(
    "convert", [bytes, bytearray, memoryview, np.array], ids=lambda f: f.__name__
)
def test_payload_types(convert):
    x = gaussian(100)
    payload = FecCodec(0).encode(x)
    np.testing.assert_array_equal(FecCodec().decode(convert(payload)), FecCodec().decode(payload))
    odd = np.frombuffer(b"." + payload.tobytes(), np.uint8)[1:]
    np.testing.assert_array_equal(FecCodec().decode(odd), FecCodec().decode(payload))
    FecCodec().decode_add(convert(payload), out := np.zeros(100, np.float32))
    np.testing.assert_array_equal(out, FecCodec().decode(payload))


def test_decoding_needs_no_threshold():
    payload = FecCodec(3).encode(f32(9, -1))
    np.testing.assert_array_equal(FecCodec(-20).decode(payload), f32(8 * FACTOR, 0))


# ---- the bytes ----------------------------------------------------------------------------------

ISAS = _kernels.available() if _kernels else []


def everything(dtype, n):
    """Payload, residual, values, sums and a payload with a NaN in it, as bytes."""
    x = gaussian(n)
    x[: n // 3] *= np.float32(0.3)  # a sparse part, a dense one, and one without signs
    x[-n // 3 :] = abs(x[-n // 3 :])
    x = x.astype(DTYPES[dtype])
    codec = FecCodec(0)
    residual = gaussian(n, seed=1, scale=0.1)
    payload = codec.encode(x, residual)
    out = gaussian(n, seed=2)
    codec.decode_add(payload, out, 0.3)
    x[n // 2] = np.nan
    results = payload, residual, codec.decode(payload), out, codec.encode(x, residual)
    return [result.tobytes() for result in results]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_canonical(dtype, monkeypatch):
    """The same whatever computes them, on however many threads."""
    n = 20 * CHUNK + 12_345
    with monkeypatch.context() as patch:
        patch.setattr(fec, "kernels", _numpy)
        patch.setenv("HVD_FEC_NUM_THREADS", "3")
        expected = everything(dtype, n)
    for isa in ISAS:
        for threads in 1, 2, 3, 5:
            monkeypatch.setenv("HVD_FEC_NUM_THREADS", str(threads))
            monkeypatch.setattr(fec, "kernels", _kernels)
            assert len(ranges(n, CHUNK)) == threads
            before = _kernels.isa()
            _kernels.use(isa)
            try:
                assert everything(dtype, n) == expected, f"{isa}, {threads} threads"
            finally:
                _kernels.use(before)


def test_layout_does_not_change_the_bytes():
    x = gaussian(4000)
    expected = FecCodec(0).encode(x)
    for offset in range(1, 17):
        shifted = np.empty(4000 + offset, np.float32)[offset:]
        shifted[:] = x
        np.testing.assert_array_equal(FecCodec(0).encode(shifted), expected)


def test_positive_values_have_no_signs():
    x = abs(gaussian(3 * CHUNK)) + 1
    assert wire.read_header(FecCodec(0).encode(x)).sections[1] == 0
    x[-CHUNK] = -1
    assert wire.read_header(FecCodec(0).encode(x)).sections[1] == 2


@pytest.mark.parametrize("n", [1, 2, 9, 1000, CHUNK, 3 * CHUNK + 1])
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_dense_payloads_take_at_most_five_bits_an_element(n, density):
    rng = np.random.default_rng(n)
    x = np.where(rng.random(n) < density, rng.choice([-1, 1], n) * 2.0 ** rng.integers(0, 15, n), 0)
    payload = FecCodec(0).encode(x)
    table = 4 * -(-n // CHUNK)
    assert payload.size <= 56 + table + -(-n // 2) + -(-n // 8)
    if density == 1:
        assert wire.read_header(payload).sections[0] == table + -(-n // 2)


def test_planes_where_runs_stop_being_shorter():
    """Dense values, then one long run: sizes never exceed the plane's, and values survive."""
    for dense in range(CHUNK // 4 - 40, CHUNK // 4 + 2, 3):
        x = np.zeros(CHUNK, np.float32)
        x[: 2 * dense : 2] = x[-1] = 1
        payload = FecCodec(0).encode(x)
        run = CHUNK // 2 - dense - 1
        assert payload.size == 60 + min(2 * dense + run // 255 + 2, CHUNK // 2)
        np.testing.assert_array_equal(FecCodec(0).decode(payload), FACTOR * x)


@pytest.mark.parametrize("kept_fraction, bound", [(0.01, 2.5), (0.001, 2.5), (0.05, 2.5)])
def test_payload_is_near_the_entropy_bound(kept_fraction, bound):
    """Positions, signs and octaves of Gaussian data, in bytes; without the header."""
    n = 1 << 20
    quantile = {0.05: 1.959964, 0.01: 2.575829, 0.001: 3.290527}[kept_fraction]
    x = gaussian(n, scale=1 / quantile)  # threshold 0 keeps the fraction
    payload = FecCodec(0).encode(x)
    octaves = np.unique(np.frexp(x[abs(x) >= 1])[1], return_counts=True)[1]
    kept = octaves.sum()
    assert 0.9 < kept / n / kept_fraction < 1.1
    p, q = kept / n, octaves / kept
    positions = -n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    entropy = (positions + kept - kept * (q * np.log2(q)).sum()) / 8
    assert payload.size - 56 <= bound * entropy


# ---- bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "threshold, message",
    [
        (True, "number, not True"),
        (np.True_, "number, not True"),
        ("3", "number, not '3'"),
        (None, "number, not None"),
        (math.nan, "number, not nan"),
        (math.inf, "number, not inf"),
        (113.5, "113.5 is outside"),
        (200, r"200 is outside -126\.\.113"),
        (-127, "-127 is outside"),
        (114, "114 is outside"),
    ],
)
def test_bad_threshold(threshold, message):
    with pytest.raises(ValueError, match=message):
        FecCodec(threshold)


def test_threshold_between_octaves():
    """Codes, values and residuals are those of an integer threshold, all times sqrt(2)."""
    root = np.float32(math.sqrt(2))
    x = np.float32([1.41, 1.42, -2.82, -2.83, 1e9, 0])
    residual = np.zeros(6, np.float32)
    payload = FecCodec(0.5).encode(x, residual)
    # sqrt(2) is 0x3fb504f3: exponent 127, and so threshold 0, and this mantissa
    assert payload[8:16].tobytes().hex() == "00000000f3043500"
    expected = np.float32([0, 1, -1, -2, 2**14, 0]) * np.float32(float(root) * 4 / 3)
    np.testing.assert_array_equal(FecCodec().decode(payload), expected)
    np.testing.assert_array_equal(residual, x - expected)
    out = np.ones(6, np.float32)
    FecCodec().decode_add(payload, out, 0.5)
    np.testing.assert_array_equal(out, 1 + expected / 2)


def test_values_well_above_the_threshold_are_counted():
    x = np.float32([0.99, 1, 1.24, -1.25, -1.3, 7, 0])
    payload, above = FecCodec(0).encode_counting(x)
    assert (wire.read_header(payload).kept, above) == (5, 3)


@pytest.mark.parametrize("threshold", [-9, -9.0, np.int64(-9), np.float32(-9)])
def test_config_recreates_the_codec(threshold):
    codec = FecCodec(threshold)
    assert (
        codec.get_config() == {"threshold": -9, "form": "planes"} and type(codec.threshold) is int
    )
    assert FecCodec(**codec.get_config()).threshold == -9
    assert repr(codec) == "FecCodec(threshold=-9, form='planes')"


@pytest.mark.parametrize(
    "x", [np.ones(3, int), np.ones(3, ">f4"), np.ones(3, complex), np.array(["a"]), None, [1, 2]],
    ids=["int", "big-endian", "complex", "str", "None", "list"],
)  # fmt: skip
def test_bad_input(x):
    with pytest.raises(
        TypeError, match="a gradient is of float16 or bfloat16 or float32 or float64, not "
    ):
        FecCodec().encode(x)


def readonly(n):
    array = np.zeros(n, np.float32)
    array.flags.writeable = False
    return array


BAD_ARRAYS = {
    "longer": (np.zeros(11, np.float32), "has 11 elements, 10 are needed"),
    "shorter": (np.zeros(9, np.float32), "has 9 elements, 10 are needed"),
    "float64": (np.zeros(10), "float32 array, not float64"),
    "big-endian": (np.zeros(10, ">f4"), "float32 array, not >f4"),
    "list": ([0.0] * 10, "float32 array, not <class 'list'>"),
    "strided": (np.zeros(20, np.float32)[::2], "C-contiguous, aligned and writeable"),
    "fortran": (np.zeros((5, 2), np.float32, "F"), "C-contiguous, aligned and writeable"),
    "unaligned": (np.zeros(41, np.uint8)[1:].view(np.float32), "C-contiguous, aligned"),
    "read-only": (readonly(10), "C-contiguous, aligned and writeable"),
}


@pytest.mark.parametrize("array, message", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_bad_residual_and_out(array, message):
    before = np.array(array)
    x = np.ones(10, np.float32)
    with pytest.raises(ValueError, match=f"residual .*{message}"):
        FecCodec().encode(x, array)
    payload = FecCodec().encode(x)
    with pytest.raises(ValueError, match=f"out .*{message}") as error:
        FecCodec().decode_add(payload, array)
    assert not isinstance(error.value, PayloadError)
    np.testing.assert_array_equal(array, before)


def test_shared_memory():
    both = np.zeros(20, np.float32)
    with pytest.raises(ValueError, match="x and residual share memory"):
        FecCodec().encode(both[5:15], both[:10])
    payload = FecCodec().encode(np.ones(10, np.float32))
    both.view(np.uint8)[: payload.size] = payload
    with pytest.raises(ValueError, match="payload and out share memory"):
        FecCodec().decode_add(both.view(np.uint8)[: payload.size], both[10:])


def test_payload_that_is_no_bytes():
    with pytest.raises(TypeError, match="not an array of float32"):
        FecCodec().decode(np.zeros(100, np.float32))
    with pytest.raises(TypeError, match="bytes-like"):
        FecCodec().decode("HFEC")
