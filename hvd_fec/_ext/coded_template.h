/* FEC's coded form: what planes hold, near its entropy. Included once per instruction set by
 * kernels.c; docs/wire-format.md describes the bits. */

/* Low bits of the Rice code of the gaps between `members` of `universe` elements: Kiely's rule for
 * geometric gaps, 2**k <= 0.9624 (mean gap + 1/2). */
static TARGET unsigned NAME(rice_bits)(uint64_t universe, uint64_t members)
{
    unsigned k = 0;
    if (!members) return 0;
    const uint64_t limit = 64 * (2 * (universe - members) + members);
    while (133 * (members << (k + 1)) <= limit) k++;
    return k;
}

static TARGET unsigned NAME(bit_length)(size_t n) { return n ? 64 - __builtin_clzll(n) : 0; }

/* ---- writing ----------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *at;
    uint64_t bits;
    unsigned count; /* below 8 between calls */
} NAME(bit_writer);

/* Writes 8 bytes, of which the last may be nothing: out needs room for 8 bytes more. len <= 56. */
static inline TARGET void NAME(put)(NAME(bit_writer) *w, uint64_t value, unsigned len)
{
    w->bits |= value << w->count;
    w->count += len;
    store64(w->at, w->bits);
    w->at += w->count >> 3;
    w->bits >>= w->count & 56;
    w->count &= 7;
}

static inline TARGET void NAME(put_gap)(NAME(bit_writer) *w, uint32_t gap, unsigned k)
{
    uint32_t zeros = gap >> k;
    const uint64_t tail = 1 | (uint64_t)(gap & ((1u << k) - 1)) << 1;
    while (zeros + 1 + k > 56) {
        unsigned some = zeros < 56 ? zeros : 56;
        NAME(put)(w, 0, some);
        zeros -= some;
    }
    NAME(put)(w, tail << zeros, zeros + 1 + k);
}

/* Which of `universe` elements the m in `member` are, in order: the gaps between them or, if they
 * are more than half, between the others. */
static TARGET void NAME(put_subset)(NAME(bit_writer) *w, const uint32_t *member, size_t m,
                                    size_t universe)
{
    uint32_t next = 0; /* the element behind the last gap */
    if (2 * m <= universe) {
        const unsigned k = NAME(rice_bits)(universe, m);
        for (size_t i = 0; i < m; i++) {
            NAME(put_gap)(w, member[i] - next, k);
            next = member[i] + 1;
        }
        return;
    }
    const unsigned k = NAME(rice_bits)(universe, universe - m);
    uint32_t other = 0;
    for (size_t i = 0; i <= m; i++) {
        const uint32_t end = i < m ? member[i] : (uint32_t)universe;
        for (; other < end; other++) {
            NAME(put_gap)(w, other - next, k);
            next = other + 1;
        }
        other = end + 1;
    }
}

/* One chunk of n elements from its planes. Returns the bytes written; *kept is what they hold. */
static TARGET size_t NAME(coded_pack_chunk)(const uint8_t **codes, const uint8_t **signs,
                                            const uint16_t *table, size_t n, uint32_t *member,
                                            uint8_t *code, uint8_t *out, uint32_t *kept)
{
    NAME(bit_writer) w = {out, 0, 0};
    uint8_t expanded[FEC_CHUNK / 8];
    size_t m = 0;
    for (size_t start = 0; start < n; start += FEC_CHUNK, table += 2) {
        const size_t len = n - start < FEC_CHUNK ? n - start : FEC_CHUNK;
        const uint8_t *sign = *signs;
        const size_t k = NAME(kept_of)(*codes, table[0], len, (const float *)code, member + m);
        if (table[1] < (k + 7) / 8) {
            NAME(unpack_runs)(sign, table[1], expanded, (k + 7) / 8);
            sign = expanded;
        }
        for (size_t i = 0; i < k; i++) {
            const uint32_t entry = member[m + i];
            code[m + i] = (uint8_t)(entry >> 16 | ((sign[i >> 3] >> (i & 7)) & 1u) << 4);
            member[m + i] = (uint32_t)start + (entry & 0xffff);
        }
        m += k;
        *codes += table[0];
        *signs += table[1];
    }
    *kept = (uint32_t)m;
    NAME(put_subset)(&w, member, m, n);
    for (size_t i = 0; i < m; i += 32) {
        const unsigned some = m - i < 32 ? (unsigned)(m - i) : 32;
        uint64_t word = 0;
        for (unsigned j = 0; j < some; j++) word |= (uint64_t)(code[i + j] >> 4) << j;
        NAME(put)(&w, word, some);
    }
    for (unsigned level = 1; level < 15 && m; level++) {
        const size_t universe = m;
        m = 0;
        for (size_t i = 0; i < universe; i++) {
            const uint8_t c = code[i] & 15;
            member[m] = (uint32_t)i;
            code[m] = c;
            m += c > level;
        }
        NAME(put)(&w, m, NAME(bit_length)(universe));
        NAME(put_subset)(&w, member, m, universe);
    }
    return (size_t)(w.at - out) + (w.count != 0);
}

/* `member` has room for what any chunk keeps and two entries more, `code` likewise. */
static TARGET size_t NAME(coded_pack)(const uint8_t *codes, const uint8_t *signs,
                                      const uint16_t *table, size_t n, uint32_t *member,
                                      uint8_t *code, uint8_t *out, uint32_t *out_table)
{
    size_t used = 0;
    for (size_t start = 0; start < n; start += CODED_CHUNK, out_table += 2) {
        const size_t len = n - start < CODED_CHUNK ? n - start : CODED_CHUNK;
        const size_t bytes = NAME(coded_pack_chunk)(&codes, &signs, table, len, member, code,
                                                    out + used, out_table + 1);
        out_table[0] = (uint32_t)bytes;
        used += bytes;
        table += 2 * (CODED_CHUNK / FEC_CHUNK);
    }
    return used;
}

/* ---- reading ----------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *data, *end; /* the stream, and where readable memory ends */
    size_t at, limit;          /* in bits */
} NAME(bit_reader);

#define CODED_PEEK 57

/* At least CODED_PEEK bits from the current one on; beyond `end` they are zeros. */
static inline TARGET uint64_t NAME(peek)(const NAME(bit_reader) *r)
{
    const uint8_t *p = r->data + (r->at >> 3);
    uint64_t w = 0;
    if (r->end - p >= 8) w = load64(p);
    else if (r->end > p) memcpy(&w, p, (size_t)(r->end - p));
    return w >> (r->at & 7);
}

/* *gap, or CODED_ENDS. */
static inline TARGET int NAME(get_gap)(NAME(bit_reader) *r, unsigned k, uint64_t *gap)
{
    const uint64_t mask = (1ull << k) - 1;
    uint64_t w = NAME(peek)(r), zeros = 0;
    unsigned here = w ? (unsigned)__builtin_ctzll(w) : 64;
    if (here + 1 + k <= CODED_PEEK) {
        *gap = (uint64_t)here << k | ((w >> here >> 1) & mask);
        r->at += here + 1 + k;
        return r->at > r->limit ? CODED_ENDS : CODED_OK;
    }
    while (here >= CODED_PEEK) {
        zeros += CODED_PEEK;
        r->at += CODED_PEEK;
        if (r->at >= r->limit) return CODED_ENDS;
        w = NAME(peek)(r);
        here = w ? (unsigned)__builtin_ctzll(w) : 64;
    }
    r->at += here + 1;
    *gap = (zeros + here) << k | (NAME(peek)(r) & mask);
    r->at += k;
    return r->at > r->limit ? CODED_ENDS : CODED_OK;
}

/* The m members of `universe` elements, in order: out[i] = map[member], or the member itself if
 * map is NULL. out may be map, since the i-th member is not below i. */
static TARGET int NAME(get_subset)(NAME(bit_reader) *r, size_t universe, size_t m,
                                   const uint32_t *map, uint32_t *out)
{
    const int others = 2 * m > universe;
    const size_t gaps = others ? universe - m : m;
    const unsigned k = NAME(rice_bits)(universe, gaps);
    uint64_t at = 0, gap;
    size_t left = others ? m : universe; /* members that gaps may still skip */
    for (size_t i = 0; i < gaps; i++) {
        const int status = NAME(get_gap)(r, k, &gap);
        if (status) return status;
        if (gap >= universe - at || gap > left) return CODED_OUTSIDE;
        if (others) {
            left -= gap;
            for (const uint64_t end = at + gap; at < end; at++)
                *out++ = map ? map[at] : (uint32_t)at;
        } else {
            at += gap;
            *out++ = map ? map[at] : (uint32_t)at;
        }
        at++;
    }
    if (others)
        for (; at < universe; at++) *out++ = map ? map[at] : (uint32_t)at;
    return CODED_OK;
}

/* One chunk of n elements that keeps m. entry[i]: position, code from bit 20 on, sign in bit 24.
 * `member` has room for m. */
static TARGET int NAME(coded_unpack_chunk)(const uint8_t *data, size_t len, const uint8_t *end,
                                           size_t n, size_t m, uint32_t *member, uint32_t *entry)
{
    NAME(bit_reader) r = {data, end, 0, 8 * len};
    int status = NAME(get_subset)(&r, n, m, NULL, entry);
    if (status) return status;
    if (r.limit - r.at < m) return CODED_ENDS;
    for (size_t i = 0; i < m; i += 32) {
        const unsigned some = m - i < 32 ? (unsigned)(m - i) : 32;
        const uint64_t word = NAME(peek)(&r);
        for (unsigned j = 0; j < some; j++)
            entry[i + j] |= 1u << 20 | (uint32_t)((word >> j) & 1) << 24;
        r.at += some;
    }
    for (unsigned level = 1; level < 15 && m; level++) {
        const size_t universe = m;
        const unsigned width = NAME(bit_length)(universe);
        if (r.limit - r.at < width) return CODED_ENDS;
        m = NAME(peek)(&r) & ((1ull << width) - 1);
        r.at += width;
        if (m > universe) return CODED_COUNT;
        status = NAME(get_subset)(&r, universe, m, level > 1 ? member : NULL, member);
        if (status) return status;
        for (size_t i = 0; i < m; i++) entry[member[i]] += 1u << 20;
    }
    const size_t left = r.limit - r.at;
    return left >= 8 || NAME(peek)(&r) & ((1u << left) - 1) ? CODED_REST : CODED_OK;
}

/* The table's lengths add up to `len`, and what it says is kept to the room in `entry`. */
static TARGET int NAME(coded_unpack)(const uint8_t *data, size_t len, const uint32_t *table,
                                     size_t n, uint32_t *member, uint32_t *entry,
                                     size_t *bad_chunk)
{
    const uint8_t *end = data + len;
    *bad_chunk = 0;
    for (size_t start = 0; start < n; start += CODED_CHUNK, table += 2, ++*bad_chunk) {
        const size_t count = n - start < CODED_CHUNK ? n - start : CODED_CHUNK;
        int status = NAME(coded_unpack_chunk)(data, table[0], end, count, table[1], member, entry);
        if (status) return status;
        data += table[0];
        entry += table[1];
    }
    return CODED_OK;
}

/* out += scale * value for the entries of coded_unpack. */
static TARGET void NAME(coded_add)(const uint32_t *entry, const uint32_t *table, size_t n,
                                   float lowest, float scale, float *out)
{
    float lut[32];
    fec_values(fec_first(lowest), scale, lut);
    for (size_t start = 0; start < n; start += CODED_CHUNK, table += 2) {
        const size_t m = table[1];
        for (size_t i = 0; i < m; i++) {
            /* in a sparse tensor too far apart for the hardware to guess */
            if (i + 16 < m) __builtin_prefetch(out + start + (entry[i + 16] & 0xfffff), 1, 2);
            out[start + (entry[i] & 0xfffff)] += lut[entry[i] >> 20];
        }
        entry += m;
    }
}
