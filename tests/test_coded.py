"""FEC's coded form: the same values as planes, fewer bytes, and no others.

The bytes are held against a reader written from docs/wire-format.md.
"""

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_fec import PayloadError, wire
from hvd_fec.codecs import FecCodec, _numpy, coded, fec

try:
    from hvd_fec._ext import _kernels
except ImportError:
    _kernels = None

KERNELS = [_numpy, *([_kernels] if _kernels else [])]


def gradient(n, density, octaves, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.choice([-1, 1], n) * 2.0 ** np.minimum(rng.geometric(1 / octaves, n) - 1, 20)
    return np.where(rng.random(n) < density, x, 0).astype(np.float32)


def encode(x, form="coded"):
    return FecCodec(0, form).encode(x)


def decode(payload):
    return FecCodec().decode(payload).view(np.uint32)


def use(monkeypatch, kernels):
    for module in fec, coded:
        monkeypatch.setattr(module, "kernels", kernels)


# ---- the reference ------------------------------------------------------------------------------


class Bits:
    def __init__(self, data):
        self.bits = "".join(f"{byte:08b}"[::-1] for byte in data)

    def number(self, width):
        taken, self.bits = self.bits[:width], self.bits[width:]
        return int("0" + taken[::-1], 2)

    def subset(self, m, u):
        gaps = u - m if 2 * m > u else m
        k = 0
        while gaps and 133 * gaps * 2 ** (k + 1) <= 64 * (2 * (u - gaps) + gaps):
            k += 1
        at, found = -1, []
        for _ in range(gaps):
            zeros = self.bits.index("1")
            self.number(zeros + 1)
            at += 1 + (zeros << k) + self.number(k)
            found.append(at)
        return found if gaps == m and 2 * m <= u else sorted(set(range(u)) - set(found))


def reference_codes(payload, n):
    """Code of each element, with its sign, of a payload of one chunk."""
    length, m = struct.unpack_from("<2I", payload, 56)
    bits = Bits(payload[64 : 64 + length])
    members = bits.subset(m, n)
    codes = [0] * n
    for i in members:
        codes[i] = -1 if bits.number(1) else 1
    for _ in range(14):
        if not members:
            break
        count = bits.number(len(members).bit_length())
        members = [members[i] for i in bits.subset(count, len(members))]
        for i in members:
            codes[i] += 1 if codes[i] > 0 else -1
    assert len(bits.bits) < 8 and "1" not in bits.bits
    return codes


# ---- round trips --------------------------------------------------------------------------------


def test_golden():
    x = np.zeros(1000, np.float32)
    x[[1, 10, 500, 501, 999]] = 1, -1.5, 2, 70000, -1
    x[600:700] = 1
    payload = encode(x)
    assert payload[10] == 1
    assert payload.tobytes()[56:].hex() == GOLDEN
    assert [c for c in reference_codes(payload.tobytes(), 1000) if c][:4] == [1, -1, 2, 15]


GOLDEN = (
    "54000000690000002300000000000000c00400544444444444444444444444444444444444444444"
    "44444444444444444444444444444444444444444444444444444444440000000080130000000000"
    "00000000000000282882fc7f"
)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(80, 3000),
    st.floats(0, 1),
    st.sampled_from([1, 1.1, 2, 8]),
    st.integers(0, 2**31),
)
def test_any_values_against_the_reference(n, density, octaves, seed):
    x = gradient(n, density, octaves, seed)
    planes, payload = encode(x, "planes"), encode(x)
    assert payload.size <= planes.size
    np.testing.assert_array_equal(decode(payload), decode(planes))
    if payload[10]:
        codes = np.minimum(np.log2(np.maximum(abs(x), 0.5)) + 1, 15).astype(int)
        expected = np.where(x < 0, -codes, codes)
        np.testing.assert_array_equal(reference_codes(payload.tobytes(), n), expected)


@pytest.mark.parametrize("n", [100, 32769, coded.CHUNK + 5])
@pytest.mark.parametrize("density, octaves", [(0.002, 2), (0.1, 1.1), (0.7, 2), (1, 8)])
def test_kernels_and_twins_write_and_read_the_same(n, density, octaves, monkeypatch):
    n = min(n, 40000) if density > 0.01 else n
    x = gradient(n, density, octaves)
    payloads, values = [], []
    for kernels in KERNELS:
        use(monkeypatch, kernels)
        for _ in kernels.available() if kernels is _kernels else [0]:
            payloads.append(encode(x).tobytes())
            values.append(decode(payloads[-1]).tobytes())
    assert len(set(payloads)) == len(set(values)) == 1


@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_and_residual_change_nothing(threads, monkeypatch):
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", threads)
    x = np.random.default_rng(0).standard_normal(3 * coded.CHUNK + 77).astype(np.float32)
    x[5] = np.nan
    residuals = np.zeros((2, x.size), np.float32)
    payloads = [FecCodec(1, f).encode(x, r) for f, r in zip(("planes", "coded"), residuals)]
    np.testing.assert_array_equal(*residuals)
    assert payloads[1].size < 0.5 * payloads[0].size
    out = np.ones((2, x.size), np.float32)
    for payload, row in zip(payloads, out):
        FecCodec().decode_add(payload, row, 0.3)
    np.testing.assert_array_equal(*out.view(np.uint32))


@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5])
def test_near_the_entropy(density):
    n = 2 * coded.CHUNK
    values = np.sort(abs(np.random.default_rng(1).standard_normal(n)))
    x = np.random.default_rng(1).standard_normal(n)
    x = (x / values[-int(density * n)]).astype(np.float32)
    kept = abs(x[abs(x) >= 1])
    p = kept.size / n
    _, counts = np.unique(np.frexp(kept)[1], return_counts=True)
    octaves = -(counts / kept.size * np.log2(counts / kept.size)).sum()
    bound = -p * np.log2(p) - (1 - p) * np.log2(1 - p) + p * (1 + octaves)
    assert encode(x).size <= 1.15 * bound * n / 8 + wire.HEADER.size


# ---- hostile bytes ------------------------------------------------------------------------------


def damaged(rng, payload):
    header = wire.read_header(payload)
    data = bytearray(payload[64:].tobytes())
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, what = rng.randrange(len(data)), rng.randrange(4)
        if what < 2:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 2:
            data[at:at] = bytes([rng.choice([0, 1, 255])] * rng.choice([1, 2, 9]))
        elif len(data) > 3:
            del data[at : at + rng.choice([1, 2])]
    kept = header.kept + rng.choice([0, 0, 0, 1, -1])
    count = header.count + rng.choice([0, 0, 0, 1, -50])
    header = header._replace(sections=(8 + len(data), 0, 0), kept=max(0, kept), count=max(0, count))
    whole = np.empty(header.nbytes, np.uint8)
    header.write(whole)
    table = struct.pack("<2I", len(data), header.kept)
    whole[56:] = np.frombuffer(table + data, np.uint8)
    return whole


def hostile(number, seed):
    """So many damaged payloads of this form."""
    rng = random.Random(seed)
    sound = [encode(gradient(n, d, o)) for n in (200, 900) for d in (0.1, 0.5) for o in (1.1, 3)]
    assert all(payload[10] for payload in sound)
    for _ in range(number):
        yield damaged(rng, rng.choice(sound))


def test_hostile_streams(monkeypatch):
    """Values or an error, the same from kernels and twins; and what is accepted is canonical."""
    found, accepted = set(), 0
    for payload in hostile(3000, seed=0):
        results = []
        for kernels in KERNELS:
            use(monkeypatch, kernels)
            try:
                results.append(decode(payload).tobytes())
            except PayloadError as error:
                results.append(str(error))
        assert len(set(results)) == 1
        if isinstance(results[0], str):
            found.update(code for code, text in coded._FAULTS.items() if text in results[0])
            continue
        accepted += 1
        values = np.frombuffer(results[0], np.float32)
        again = encode(values)
        assert not again[10] or again[56:].tobytes() == payload[56:].tobytes()
    assert accepted > 100 and found == set(coded._FAULTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"form": 2},
        {"sections": (8, 1, 0)},
        {"sections": (7, 0, 0)},
        {"count": 2**60},
        {"kept": 2**40, "count": 2**41},
    ],
)
def test_headers_that_do_not_fit(changes):
    header = wire.Header(1, 3, 0, 0, 1000, 0, (8, 0, 0), form=1)._replace(**changes)
    payload = np.zeros(header.nbytes, np.uint8)
    header.write(payload)
    with pytest.raises(PayloadError, match=r"\d"):
        FecCodec().decode_add(payload, np.zeros(1000, np.float32))


def test_thresholds_between_octaves():
    x = gradient(5000, 0.2, 2) * np.float32(1.1)
    payloads = [FecCodec(0.3, form).encode(x) for form in fec.FORMS]
    assert payloads[1][10] and payloads[1].size < payloads[0].size
    np.testing.assert_array_equal(*map(decode, payloads))


def test_unknown_form():
    with pytest.raises(ValueError, match="form must be one of planes, coded, not 'best'"):
        FecCodec(form="best")
