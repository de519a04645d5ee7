"""NumPy twins of the compiled kernels: the oracle of the tests, and the fallback.

Same names, arguments, results and bytes as ``hvd_fec/_ext/_kernels.pyx``, except in a thread that
flushes denormals to zero, as TensorFlow's do: the compiled kernels switch that off, NumPy cannot.
"""

import numpy as np

CHUNK = 32768
"""Elements of one independently coded chunk."""
OK = 0
CODES_TOO_LONG, CODES_OVERRUN, CODES_ZERO, CODES_PADDING = 1, 2, 3, 4
SIGNS_TOO_LONG, SIGNS_OVERRUN, SIGNS_ZERO, SIGNS_PADDING = 5, 6, 7, 8
LENGTHS = 9


def isa():
    return "numpy"


def _to_float(x, dtype):
    if dtype == 1:
        return x.view(np.float16).astype(np.float32)
    if dtype == 2:
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == 3:
        return x.view(np.float32)
    if dtype == 4:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.view(np.float64).astype(np.float32)
    raise ValueError(f"unknown dtype code {dtype}")


def all_finite(x, dtype):
    return bool(np.isfinite(_to_float(x, dtype)).all())


def pack_runs(plane, out):
    n = plane.size
    used = previous = 0
    for at in np.flatnonzero(plane):
        run = int(at) - previous
        token = bytes([255] * (run // 255) + [run % 255, plane[at]])
        if used + len(token) >= n:
            return n
        out[used : used + len(token)] = np.frombuffer(token, np.uint8)
        used += len(token)
        previous = int(at) + 1
    return used


def unpack_runs(stream, plane):
    plane[:] = 0
    at = i = 0
    data = stream.tobytes()
    while i < len(data):
        run, i = data[i], i + 1
        at += run
        if i == len(data):
            return 2
        if run == 255:
            continue
        if at >= plane.size:
            return 1
        if not data[i]:
            return 2
        plane[at] = data[i]
        at, i = at + 1, i + 1
    return 0


def _stream(plane):
    out = np.empty(plane.size, np.uint8)
    used = pack_runs(plane, out)
    return plane if used == plane.size else out[:used]


def _bits(value):
    return np.array(value, np.float32).view(np.uint32)[()]


def _first(lowest):
    """What code 1 decodes to: 4/3 of the smallest kept magnitude. Code c is 2**(c - 1) times it."""
    return np.float32(np.float64(np.float32(lowest)) * 4 / 3)


def _quantise(x, residual, lowest):
    """5-bit codes (sign in bit 4) of x + residual, and how many are well above the lowest; updates
    the residual."""
    smallest = np.int64(_bits(lowest))
    value = x if residual is None else x + residual
    bits = value.view(np.uint32)
    sign = bits & np.uint32(0x80000000)
    magnitude = np.minimum(bits & np.uint32(0x7FFFFFFF), np.uint32(0x7F7FFFFF))
    over = magnitude.astype(np.int64) - smallest
    code = np.clip((over >> 23) + 1, 0, 15)
    if residual is not None:
        octave = np.maximum(code - 1, 0).astype(np.uint32) << np.uint32(23)
        decoded = _bits(_first(lowest)) + octave | sign
        decoded[code == 0] = 0
        np.subtract((magnitude | sign).view(np.float32), decoded.view(np.float32), residual)
    codes = (code | np.where(code > 0, sign >> 27, 0)).astype(np.uint8)
    return codes, np.count_nonzero(over >= 1 << 21)


def fec_encode(x, dtype, residual, lowest, codes, signs, table):
    x = _to_float(x, dtype)
    if residual is not None and residual.size != x.size:
        raise ValueError(f"residual has {residual.size} elements, x has {x.size}")
    if not 2.0**-126 <= lowest <= 2.0**113:
        raise ValueError(f"threshold {lowest} is outside 2**-126..2**113")
    code_bytes = sign_bytes = kept = above = 0
    for chunk, start in enumerate(range(0, x.size, CHUNK)):
        part = slice(start, start + CHUNK)
        with np.errstate(over="ignore", invalid="ignore"):
            part_residual = None if residual is None else residual[part]
            quantised, n = _quantise(x[part], part_residual, lowest)
        nibbles = np.append(quantised & 15, np.zeros(quantised.size % 2, np.uint8))
        plane = nibbles[0::2] | nibbles[1::2] << 4
        bits = (quantised >> 4)[quantised > 0]
        kept += bits.size
        above += n
        stream = _stream(plane)
        codes[code_bytes : code_bytes + stream.size] = stream
        sign_stream = _stream(np.packbits(bits, bitorder="little"))
        signs[sign_bytes : sign_bytes + sign_stream.size] = sign_stream
        table[2 * chunk : 2 * chunk + 2] = stream.size, sign_stream.size
        code_bytes += stream.size
        sign_bytes += sign_stream.size
    return code_bytes, sign_bytes, kept, above


def _plane(stream, size, too_long):
    """(status, plane) of one chunk's stream; ``too_long`` is its first status code."""
    if stream.size > size:
        return too_long, None
    if stream.size == size:
        return OK, stream
    plane = np.empty(size, np.uint8)
    bad = unpack_runs(stream, plane)
    return (too_long + bad if bad else OK), plane


def _unpack_chunk(codes, signs, n):
    """(status, codes per element, sign bits of the kept ones)."""
    status, plane = _plane(codes, (n + 1) // 2, CODES_TOO_LONG)
    if status:
        return status, None, None
    nibbles = np.stack([plane & 15, plane >> 4], -1).reshape(-1)
    if nibbles[n:].any():
        return CODES_PADDING, None, None
    kept = np.count_nonzero(nibbles)
    status, plane = _plane(signs, (kept + 7) // 8, SIGNS_TOO_LONG)
    if status:
        return status, None, None
    bits = np.unpackbits(plane, bitorder="little")
    if bits[kept:].any():
        return SIGNS_PADDING, None, None
    return OK, nibbles[:n], bits[:kept]


def _chunks(codes, signs, table, n):
    """Yield (chunk, start, status, codes per element, sign bits), up to the first bad chunk."""
    for chunk, start in enumerate(range(0, n, CHUNK)):
        code_len, sign_len = int(table[2 * chunk]), int(table[2 * chunk + 1])
        if code_len > codes.size or sign_len > signs.size:
            yield chunk, start, LENGTHS, None, None
            return
        result = _unpack_chunk(codes[:code_len], signs[:sign_len], min(CHUNK, n - start))
        yield (chunk, start, *result)
        if result[0]:
            return
        codes, signs = codes[code_len:], signs[sign_len:]
    if codes.size or signs.size:
        yield (n + CHUNK - 1) // CHUNK, n, LENGTHS, None, None


def fec_check(codes, signs, table, n):
    kept = 0
    if table.size != 2 * ((n + CHUNK - 1) // CHUNK):
        raise ValueError(f"{table.size} table entries for {n} elements")
    for chunk, _, status, nibbles, _ in _chunks(codes, signs, table, n):
        if status:
            return status, chunk, kept
        kept += np.count_nonzero(nibbles)
    return OK, (n + CHUNK - 1) // CHUNK, kept


def values(lowest, scale):
    """float32[32]: scale times the value of code c at [c], negated at [16 + c]."""
    octaves = np.array([0, *range(15)], np.uint32) << 23
    with np.errstate(over="ignore"):
        positive = (_bits(_first(lowest)) + octaves).view(np.float32) * np.float32(scale)
    positive[0] = 0
    return np.concatenate([positive, -positive])


def fec_decode_add(codes, signs, table, lowest, scale, out):
    lut = values(lowest, scale)
    for _, start, _, nibbles, bits in _chunks(codes, signs, table, out.size):
        at = np.flatnonzero(nibbles)
        with np.errstate(over="ignore", invalid="ignore"):
            out[start + at] += lut[nibbles[at] | bits << 4]


# ---- coded --------------------------------------------------------------------------------------

CODED = 1 << 20
"""Elements of one chunk of the coded form."""
CODED_ENDS, CODED_OUTSIDE, CODED_COUNT, CODED_REST = 1, 2, 3, 4


def coded_room(n, kept):
    return n // 4 + 3 * kept + 64 * -(-n // CODED)


def _rice_bits(universe, members):
    k = 0
    while members and 133 * (members << (k + 1)) <= 64 * (2 * (universe - members) + members):
        k += 1
    return k


def _number(value, width):
    return (value >> np.arange(width) & 1).astype(np.uint8)


def _subset(member):
    """The bits that say where the boolean array ``member`` is set."""
    if 2 * np.count_nonzero(member) > member.size:
        member = ~member
    gaps = np.diff(np.flatnonzero(member), prepend=-1) - 1
    k = _rice_bits(member.size, gaps.size)
    ends = np.cumsum((gaps >> k) + 1 + k) - 1
    bits = np.zeros(ends[-1] + 1 if ends.size else 0, np.uint8)
    bits[ends - k] = 1
    for j in range(k):
        bits[ends - k + 1 + j] = gaps >> j & 1
    return bits


def coded_pack(codes, signs, table, n, kept, out, out_table):
    chunks = list(_chunks(codes, signs, table, n))
    used = 0
    for chunk in range(-(-n // CODED)):
        part = chunks[chunk * CODED // CHUNK : (chunk + 1) * CODED // CHUNK]
        code = np.concatenate([nibbles for *_, nibbles, _ in part])
        bits = [_subset(code > 0), *(sign for *_, sign in part)]
        code = code[code > 0]
        out_table[2 * chunk + 1] = code.size
        for level in range(1, 15):
            if code.size:
                higher = code > level
                bits += [_number(np.count_nonzero(higher), code.size.bit_length()), _subset(higher)]
                code = code[higher]
        stream = np.packbits(np.concatenate(bits), bitorder="little")
        out_table[2 * chunk] = stream.size
        out[used : used + stream.size] = stream
        used += stream.size
    return used


class _Bits:
    """Reads the bits of one stream."""

    def __init__(self, stream):
        self.bits = np.unpackbits(stream, bitorder="little")
        ones = np.where(self.bits, np.arange(self.bits.size), self.bits.size)
        self.next_one = [*np.minimum.accumulate(ones[::-1])[::-1].tolist(), self.bits.size]
        self.at = 0

    def number(self, width):
        bits = self.bits[self.at : self.at + width]
        self.at += width
        return int((bits.astype(np.uint64) << np.arange(bits.size, dtype=np.uint64)).sum())

    def subset(self, universe, m):
        """(status, boolean array of which m of the elements are meant)."""
        others = 2 * m > universe
        gaps = universe - m if others else m
        left = m if others else universe
        k = _rice_bits(universe, gaps)
        chosen = np.zeros(universe, bool)
        place, size = 0, self.bits.size
        for _ in range(gaps):
            end = self.next_one[self.at]
            if end + 1 + k > size:
                return CODED_ENDS, None
            gap = end - self.at << k
            self.at = end + 1
            gap += self.number(k) if k else 0
            if gap >= universe - place or gap > left:
                return CODED_OUTSIDE, None
            left -= gap if others else 0
            place += gap
            chosen[place] = True
            place += 1
        return OK, ~chosen if others else chosen


def _coded_unpack_chunk(stream, n, m):
    """(status, entries) of one chunk."""
    bits = _Bits(stream)
    status, member = bits.subset(n, m)
    if status:
        return status, None
    if bits.bits.size - bits.at < m:
        return CODED_ENDS, None
    sign = bits.bits[bits.at : bits.at + m].astype(np.uint32)
    bits.at += m
    code = np.ones(m, np.uint32)
    members = np.arange(m)
    for _ in range(1, 15):
        if not members.size:
            break
        width = members.size.bit_length()
        if bits.bits.size - bits.at < width:
            return CODED_ENDS, None
        count = bits.number(width)
        if count > members.size:
            return CODED_COUNT, None
        status, higher = bits.subset(members.size, count)
        if status:
            return status, None
        members = members[higher]
        code[members] += 1
    rest = bits.bits[bits.at :]
    if rest.size >= 8 or rest.any():
        return CODED_REST, None
    return OK, np.flatnonzero(member).astype(np.uint32) | code << 20 | sign << 24


def coded_unpack(data, table, n, entries):
    chunk = -1
    for chunk, (length, kept) in enumerate(table.reshape(-1, 2).tolist()):
        size = min(CODED, n - chunk * CODED)
        status, part = _coded_unpack_chunk(data[:length], size, kept)
        if status:
            return status, chunk
        entries[:kept] = part
        data, entries = data[length:], entries[kept:]
    return OK, chunk + 1


def coded_add(entries, table, lowest, scale, out):
    lut = values(lowest, scale)
    start = np.repeat(np.arange(table.size // 2) * CODED, table[1::2])
    with np.errstate(over="ignore", invalid="ignore"):
        out[start + (entries & 0xFFFFF)] += lut[entries >> 20]


# ---- ternary ------------------------------------------------------------------------------------

LANES = 16
"""Words of a whole block."""
MAX_RANKS = 16383


def digits_of(ranks):
    """(base, digits) of the words that hold sums over ``ranks`` ranks."""
    base, digits = 2 * ranks + 1, 0
    while base ** (digits + 1) < 2**64:
        digits += 1
    return base, digits


def _radix(ranks, n, words):
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"{ranks} ranks are outside 1..{MAX_RANKS}")
    base, digits = digits_of(ranks)
    if words != -(-n // digits):
        raise ValueError(f"{words} words for {n} values of {ranks} ranks, {digits} to a word")
    return base, digits


def _by_word(n, digits):
    """Index of the value in each digit of each word, most significant first; n or more for none."""
    block = digits * LANES
    whole = np.arange(n // block * block).reshape(-1, digits, LANES)
    rest = n - whole.size
    lanes = -(-rest // digits)
    last = np.arange(digits * lanes).reshape(digits, lanes)
    last = np.where(last < rest, whole.size + last, n)
    return np.concatenate([whole.transpose(0, 2, 1).reshape(-1, digits), last.T])


def _to_words(t, ranks, words):
    base, digits = _radix(ranks, t.size, words.size)
    places = np.append(t.astype(np.int64), 0)[_by_word(t.size, digits)]
    words[:] = 0
    for place in range(digits):
        words *= base
        words += places[:, place]
    return int(np.count_nonzero(t))


def ternary_survey(x, dtype, residual, squares):
    x = _to_float(x, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        v = x if residual is None else x + residual
        for chunk, start in enumerate(range(0, x.size, CHUNK)):
            part = v[start : start + CHUNK].astype(np.float64)
            lanes = np.append(part, np.zeros(-part.size % LANES)).reshape(-1, LANES)
            total = np.zeros(LANES)
            for row in lanes * lanes:
                total += row
            while total.size > 1:
                total = total[: total.size // 2] + total[total.size // 2 :]
            squares[chunk] = total[0]
    return int((v.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(initial=0))


def ternary_encode(x, dtype, residual, step, level, ranks, words):
    v = _to_float(x, dtype)
    if residual is not None:
        v = v + residual
    t = (v >= np.float32(level)).astype(np.int8) - (v <= -np.float32(level))
    if residual is not None:
        residual[:] = v - t.astype(np.float32) * np.float32(step)
    return _to_words(t, ranks, words)


def draws(n, first, key):
    """24-bit numbers for n indices from ``first`` on, uint32 of shape (n,)."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    h = (np.arange(n, dtype=np.uint64) + first).astype(np.uint32) + low
    h = ((h ^ h >> 16) * np.uint32(0x7FEB352D)) ^ high
    h = (h ^ h >> 16) * np.uint32(0x7FEB352D)
    h = (h ^ h >> 15) * np.uint32(0x846CA68B)
    return (h ^ h >> 16) >> 8


def ternary_draw(x, dtype, step, first, key, ranks, words):
    x = _to_float(x, dtype)
    bound = draws(x.size, first, key).astype(np.float32) * (np.float32(step) * np.float32(2**-24))
    return _to_words((x > bound).astype(np.int8) - (x < -bound), ranks, words)


def ternary_decode(words, ranks, scale, out):
    n = out.size
    base, digits = _radix(ranks, n, words.shape[1])
    if not 1 <= len(words) * ranks <= MAX_RANKS:
        raise ValueError(f"{len(words)} parts of {ranks} ranks are outside 1..{MAX_RANKS}")
    places = _by_word(n, digits)
    total = np.zeros(n + 1, np.int32)
    for row in words:
        word = row.view(np.uint64) + np.uint64((base**digits - 1) // 2)
        if (word > np.uint64(base**digits - 1)).any():
            return 1
        for place in reversed(range(digits)):
            digit = (word % np.uint64(base)).astype(np.int32) - ranks
            word //= np.uint64(base)
            if digit[places[:, place] == n].any():
                return 2
            total[places[:, place]] += digit
    out[:] = total[:n].astype(np.float32) * np.float32(scale)
    return 0
