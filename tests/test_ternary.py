"""Ternary in one process: kernels against their twins, the codec, the survey table."""

import math

import numpy as np
import pytest

from hvd_fec import survey as tables
from hvd_fec.codecs import TernaryCodec, _numpy
from hvd_fec.codecs.ternary import Survey, gathers, survey
from hvd_fec.wire import DTYPES, PayloadError

try:
    from hvd_fec._ext import _kernels as compiled
except ImportError:
    compiled = None

RANKS = (1, 2, 3, 4, 7, 8, 31, 68, 100, 127, 128, 282, 512, 724, 812, 3000, 16383)
KEY = 0x9E3779B97F4A7C15


@pytest.fixture(params=compiled.available() if compiled else [])
def kernels(request):
    """The compiled kernels, once per instruction set of this machine."""
    before = compiled.isa()
    compiled.use(request.param)
    yield compiled
    compiled.use(before)


def values(n, dtype="float32", seed=0, scale=1.0):
    rng = np.random.default_rng([n, seed])
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return (rng.standard_normal(n) * scale).astype(dtype)


def words_of(t, ranks):
    words = np.empty(TernaryCodec(ranks).words(t.size), np.int64)
    _numpy._to_words(np.asarray(t), ranks, words)
    return words


def raw(x):
    return x.reshape(-1).view(np.uint8)


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, digits", [(1, 40), (2, 27), (3, 22), (4, 20), (8, 15), (100, 8)])
def test_digits_per_word(ranks, digits):
    codec = TernaryCodec(ranks)
    assert (codec.base, codec.digits) == (2 * ranks + 1, digits)


@pytest.mark.parametrize("ranks", RANKS)
def test_no_sum_overflows(ranks):
    codec = TernaryCodec(ranks)
    largest = ranks * sum(codec.base**place for place in range(codec.digits))
    assert largest < 2**63
    assert codec.base ** (codec.digits + 1) > 2**64  # and one more digit would


@pytest.mark.parametrize("ranks", [0, 16384, -1])
def test_ranks_out_of_range(ranks):
    with pytest.raises(ValueError, match="outside 1..16383"):
        TernaryCodec(ranks)


def test_gathering_moves_fewer_bytes():
    def ring(n):
        return 2 * (n - 1) / n * 8 / TernaryCodec(n).digits

    def gather(n):
        return (n - 1) * 8 / TernaryCodec(1).digits

    for n in range(2, 300):
        assert gathers(n) == (gather(n) < ring(n) - 1e-12), n
    assert [n for n in range(2, 300) if gathers(n)] == [2, 3]


def test_golden_words():
    """The example of docs/wire-format.md."""
    t = np.array([1, 0, -1, 1, 1, 0, -1], np.float32)
    words = np.empty(1, np.int64)
    assert TernaryCodec(2).encode(t, 1.0, 0.5, words) == 5
    places = sum(int(v) * 5**place for v, place in zip(t, range(26, 19, -1)))
    assert words[0] == 1444721221923828125 == places
    out = np.empty(7, np.float32)
    TernaryCodec(2).decode(2 * words[None], 0.25, out)
    assert out.tolist() == [0.5, 0, -0.5, 0.5, 0.5, 0, -0.5]


def test_golden_order():
    """Two words hold the even and the odd values of a tensor of 28; a block holds 16 lanes."""
    words = np.empty(2, np.int64)
    t = np.zeros(28, np.float32)
    t[1] = 1
    TernaryCodec(2).encode(t, 1.0, 0.5, words)
    assert words.tolist() == [0, 5**26]
    words = np.empty(17, np.int64)
    t = np.zeros(27 * 16 + 1, np.float32)
    t[[17, 432]] = 1
    TernaryCodec(2).encode(t, 1.0, 0.5, words)
    assert {i: int(w) for i, w in enumerate(words) if w} == {1: 5**25, 16: 5**26}


# ---- kernels and twins ---------------------------------------------------------------------------


def same_bits(a, b):
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("ranks", RANKS)
def test_kernels_match_twins(kernels, ranks):
    digits = TernaryCodec(ranks).digits
    block = 16 * digits
    lengths = [*range(0, 258, 1 if ranks in (1, 2, 4) else 37), block - 1, block, block + 1]
    for n in [*lengths, 3 * block + digits + 1]:
        for offset in (0, 1, 3):
            x = values(n + offset)[offset:]
            residual = values(n + offset, seed=1)[offset:]
            mine, twin = residual.copy(), residual.copy()
            a, b = np.empty((2, -(-n // digits)), np.int64)
            args = (raw(x), 3)
            kept = kernels.ternary_encode(*args, mine, 1.3, 0.65, ranks, a)
            assert kept == _numpy.ternary_encode(*args, twin, 1.3, 0.65, ranks, b)
            same_bits(a, b)
            same_bits(mine, twin)
            kept = kernels.ternary_draw(*args, 2.0, 2**32 - 9, KEY, ranks, a)
            assert kept == _numpy.ternary_draw(*args, 2.0, 2**32 - 9, KEY, ranks, b)
            same_bits(a, b)
            total = np.random.default_rng(n).integers(-ranks, ranks, n, endpoint=True)
            rows = np.stack([words_of(total, ranks)])
            mine, twin = np.full((2, n), 7, np.float32)
            assert kernels.ternary_decode(rows, ranks, 0.37, mine) == 0
            assert _numpy.ternary_decode(rows, ranks, 0.37, twin) == 0
            same_bits(mine, twin)
            same_bits(mine, total.astype(np.float32) * np.float32(0.37))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1023, 1024, 1040, 32768, 32769, 70001])
def test_survey_kernel_matches_twin(kernels, n):
    for dtype, code in DTYPES.items():
        x, residual = values(n, dtype), values(n, seed=1)
        for r in (None, residual):
            a, b = np.empty((2, -(-n // _numpy.CHUNK)))
            peak = kernels.ternary_survey(raw(x), code, r, a)
            assert peak == _numpy.ternary_survey(raw(x), code, r, b)
            same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_packed_alike(kernels, dtype):
    n = 16 * 27 * 3 + 5
    x = values(n, dtype)
    residual = values(n, seed=1)
    mine, twin = residual.copy(), residual.copy()
    a, b = np.empty((2, -(-n // 27)), np.int64)
    kernels.ternary_encode(raw(x), DTYPES[dtype], mine, 1.3, 0.65, 2, a)
    _numpy.ternary_encode(raw(x.astype(np.float32)), 3, twin, 1.3, 0.65, 2, b)
    same_bits(a, b)
    same_bits(mine, twin)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_gathered_rows_are_added(kernels, parts):
    n = 16 * 40 * 2 + 77
    t = np.random.default_rng(parts).integers(-1, 1, (parts, n), endpoint=True)
    rows = np.stack([words_of(row, 1) for row in t])
    out = np.empty(n, np.float32)
    assert kernels.ternary_decode(rows, 1, 0.37, out) == 0
    same_bits(out, t.sum(axis=0).astype(np.float32) * np.float32(0.37))


def test_any_words_decode_or_are_refused(kernels):
    rng = np.random.default_rng(3)
    refused = 0
    for ranks in (1, 2, 3, 8, 100, 700, 16383):
        digits = TernaryCodec(ranks).digits
        for n in (1, digits - 1, digits, 16 * digits, 40 * digits + 3):
            for _ in range(20):
                words = rng.integers(-(2**63), 2**63 - 1, (1, -(-n // digits)), endpoint=True)
                mine, twin = np.empty((2, n), np.float32)
                status = kernels.ternary_decode(words, ranks, 1.0, mine)
                assert status == _numpy.ternary_decode(words, ranks, 1.0, twin) or status
                refused += bool(status)
                if not status:
                    same_bits(mine, twin)
    assert refused > 100


@pytest.mark.parametrize("ranks", [2, 4, 8, 127])
def test_largest_word_is_the_last_that_decodes(kernels, ranks):
    codec = TernaryCodec(ranks)
    n = 16 * codec.digits
    top = (codec.base**codec.digits - 1) // 2
    out = np.empty(n, np.float32)
    for sign in (1, -1):
        words = np.full((1, 16), sign * top, np.int64)
        assert kernels.ternary_decode(words, ranks, 1.0, out) == 0
        assert (out == sign * ranks).all()
        if top < 2**63 - 1:
            words[0, 7] += sign
            assert kernels.ternary_decode(words, ranks, 1.0, out) == 1


# ---- codec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.5, 0.01])
def test_mxnets_rule(threshold):
    """Fifty steps of sent values and residuals, bit for bit."""
    n = 4099
    step = np.float32(threshold)
    codec = TernaryCodec(2)
    mine, theirs = np.zeros((2, n), np.float32)
    words, sent = np.empty(codec.words(n), np.int64), np.empty(n, np.float32)
    for i in range(50):
        x = values(n, seed=i, scale=threshold)
        codec.encode(x, step, step, words, mine)
        codec.decode(words[None], step, sent)
        theirs += x
        up, down = theirs >= step, theirs <= -step
        theirs[up] -= step
        theirs[down] += step
        same_bits(sent, np.where(up, step, np.where(down, -step, np.float32(0))))
        same_bits(mine, theirs)


@pytest.mark.parametrize("clip", [None, 2.5])
def test_stochastic_rounding_is_unbiased(clip):
    n, draws = 300, 20000
    x = values(n)
    x[:3] = 0, 1e-9, -1e-5
    seen = survey(x)
    step = seen.peak if clip is None else min(seen.peak, clip * seen.rms)
    wanted = np.clip(x.astype(np.float64), -step, step)
    codec = TernaryCodec(1)
    words, out = np.empty(codec.words(n), np.int64), np.empty(n, np.float32)
    rng = np.random.default_rng(5)
    total = np.zeros(n)
    for key in rng.integers(0, 2**64 - 1, draws, dtype=np.uint64):
        codec.draw(x, step, int(key), words)
        codec.decode(words[None], 1.0, out)
        total += out
    p = np.abs(wanted) / step
    error = np.abs(total / draws * step - wanted)
    # probabilities are multiples of 2**-24
    assert (error <= 4 * step * np.sqrt(p * (1 - p) / draws) + step * 2**-24).all()
    assert total[0] == 0


def test_draws_differ_by_key_and_index_only():
    x = np.full(100_000, 0.5, np.float32)
    codec = TernaryCodec(2)
    a, b, c = np.empty((3, codec.words(x.size)), np.int64)
    codec.draw(x, 1.0, KEY, a)
    codec.draw(x, 1.0, KEY, b)
    codec.draw(x, 1.0, KEY ^ 1 << 40, c)
    same_bits(a, b)
    out = np.empty((2, x.size), np.float32)
    codec.decode(a[None], 1.0, out[0])
    codec.decode(c[None], 1.0, out[1])
    # independent fair coins: means and their correlation are within 5 standard errors
    assert np.abs(out.mean(axis=1) - 0.5).max() < 5 * 0.5 / math.sqrt(x.size)
    assert abs(np.corrcoef(out)[0, 1]) < 5 / math.sqrt(x.size)
    assert abs(np.corrcoef(out[0, 1:], out[0, :-1])[0, 1]) < 5 / math.sqrt(x.size)


@pytest.mark.parametrize("n", [1_000_003, 27 * 16 * 1024])
@pytest.mark.parametrize("threads", ["1", "2", "3", "5"])
def test_threads_change_nothing(monkeypatch, threads, n):
    x, residual = values(n), values(n, seed=1)
    codec = TernaryCodec(2)
    words = np.empty(codec.words(n), np.int64)
    results = []
    for count in ("1", threads):
        monkeypatch.setenv("HVD_FEC_NUM_THREADS", count)
        rest, out = residual.copy(), np.empty(n, np.float32)
        seen = survey(x, rest)
        kept = codec.encode(x, 1.0, 0.5, words, rest)
        codec.decode(words[None], 0.1, out)
        packed = words.copy()
        drawn = codec.draw(x, seen.peak, KEY, words)
        arrays = (packed, words, rest, out)
        results.append((seen, kept, drawn, *(array.tobytes() for array in arrays)))
    assert results[0] == results[1]


def test_survey_values():
    x, residual = values(70001), values(70001, seed=1)
    seen = survey(x, residual)
    v = (x + residual).astype(np.float64)
    assert seen.peak == np.abs(v).max()
    assert seen.rms == pytest.approx(math.sqrt((v**2).mean()), rel=1e-6)
    assert survey(np.empty(0, np.float32)) == Survey(0.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 999, 40000])
def test_survey_finds_what_is_not_finite(dtype, bad, at):
    x = values(40001, dtype)
    x[at] = bad
    assert not math.isfinite(survey(x, values(x.size, seed=1)).peak)
    if dtype == "float64":
        x[at] = 1e39  # beyond float32
        assert not math.isfinite(survey(x).peak)


def test_extremes():
    tiny, huge = np.float32(1e-45), np.finfo(np.float32).max
    assert survey(np.full(5, tiny)) == Survey(float(tiny), float(tiny))
    assert survey(np.full(5, huge)) == Survey(float(huge), float(huge))
    assert survey(np.full(5, np.finfo(np.float16).max, np.float16)).peak == 65504
    words = np.empty(1, np.int64)
    residual = np.full(3, -0.0, np.float32)
    assert TernaryCodec(2).encode(np.zeros(3, np.float32), 0.0, math.inf, words, residual) == 0
    assert words[0] == 0 and not residual.any()


def test_wrong_arguments():
    codec = TernaryCodec(2)
    x = values(100)
    good = np.empty(4, np.int64)
    for words in (np.empty(3, np.int64), np.empty(4, np.int32), np.empty(8, np.int64)[::2]):
        with pytest.raises(ValueError, match="need 4 words"):
            codec.encode(x, 1.0, 0.5, words)
    with pytest.raises(ValueError, match="share memory"):
        codec.encode(x, 1.0, 0.5, good, x)
    with pytest.raises(ValueError, match="99"):
        codec.encode(x, 1.0, 0.5, good, np.zeros(99, np.float32))
    with pytest.raises(TypeError, match="int32"):
        codec.encode(x.astype(np.int32), 1.0, 0.5, good)
    with pytest.raises(ValueError, match="need 4 words"):
        codec.decode(good[None, :3], 1.0, np.empty(100, np.float32))
    with pytest.raises(PayloadError, match="out of range"):
        codec.decode(np.full((1, 4), 2**63 - 1), 1.0, np.empty(100, np.float32))
    with pytest.raises(PayloadError, match="after the last value"):
        codec.decode(np.full((1, 1), 1), 1.0, np.empty(26, np.float32))
    with pytest.raises(ValueError, match="parts"):
        codec.decode(np.empty((0, 4), np.int64), 1.0, np.empty(100, np.float32))


# ---- the survey table ----------------------------------------------------------------------------

SURVEYS = [[Survey(2.5, 0.5), Survey(math.nan, math.nan)], [Survey(3.0, 1.5), Survey(0.0, 0.0)]]


def test_table_of_all_ranks():
    rows = [tables.row(rank, 2, 77, 1 - rank, SURVEYS[rank]) for rank in range(2)]
    table = tables.read(sum(rows), 2, 2)
    assert table.present == [0, 1] and table.complete and table.probe == 0.5
    assert table.surveys[0] == Survey(3.0, math.sqrt((0.5**2 + 1.5**2) / 2))
    assert math.isnan(table.surveys[1].peak) and math.isnan(table.surveys[1].rms)


def test_table_without_a_joined_rank():
    table = tables.read(tables.row(1, 3, 77, 0, SURVEYS[0]), 3, 2)
    assert table.present == [1] and not table.complete and table.probe == 0


def test_golden_row():
    row = tables.row(1, 2, 3, 1, [Survey(2.0, 1.0)])
    assert row.tolist() == [0, 0, 3 << 1 | 1, 0x3F800000_40000000]


def test_table_with_a_failed_rank():
    rows = tables.failed_row(1, 2, 2) + tables.row(0, 2, 77, 1, SURVEYS[0])
    with pytest.raises(RuntimeError, match=r"failed on rank \[1\]"):
        tables.read(rows, 2, 2)


def test_table_of_ranks_that_differ():
    rows = tables.row(0, 2, 77, 1, SURVEYS[0]) + tables.row(1, 2, 78, 0, SURVEYS[0])
    with pytest.raises(RuntimeError, match="ranks 0 and 1 cannot add up"):
        tables.read(rows, 2, 2)


def test_fingerprint_tells_settings_and_shapes():
    marks = {
        tables.fingerprint(settings, shapes)
        for settings in ({"a": 1}, {"a": 2}, {"b": 1})
        for shapes in ([(2, 3)], [(3, 2)], [(2, 3), (1,)])
    }
    assert len(marks) == 9 and all(1 <= mark <= 2**61 for mark in marks)


def test_hostile_tables():
    rng = np.random.default_rng(1)
    with pytest.raises(PayloadError, match="shape"):
        tables.read(np.zeros(5, np.int64), 2, 2)
    with pytest.raises(PayloadError, match="int32"):
        tables.read(np.zeros(6, np.int32), 2, 2)
    with pytest.raises(PayloadError, match="heads"):
        tables.read(np.zeros(6, np.int64), 2, 2)
    for _ in range(300):
        try:
            tables.read(rng.integers(-(2**63), 2**63 - 1, 6), 2, 2)
        except (PayloadError, RuntimeError):
            pass
