/* Included once per instruction set by kernels.c with
 *   NAME(x)  the function name with the set's suffix
 *   TARGET   its target attribute
 * The loops are written so that the compiler vectorises them for that target. */

/* ---- conversion of a block to float32 --------------------------------------------------- */

static TARGET void NAME(to_float)(const void *x, int dtype, size_t start, size_t n, float *out)
{
    if (dtype == DTYPE_FLOAT32) {
        memcpy(out, (const float *)x + start, n * sizeof(float));
    } else if (dtype == DTYPE_FLOAT64) {
        const double *p = (const double *)x + start;
        for (size_t i = 0; i < n; i++) out[i] = (float)p[i];
    } else if (dtype == DTYPE_BFLOAT16) {
        const uint16_t *p = (const uint16_t *)x + start;
        for (size_t i = 0; i < n; i++) out[i] = float_of((uint32_t)p[i] << 16);
    } else {
        /* float16: shift the fields into place, then one exact product moves the exponent and
         * normalises subnormals. Infinities never come here (all_finite). */
        const uint16_t *p = (const uint16_t *)x + start;
        for (size_t i = 0; i < n; i++) {
            uint32_t magnitude = (uint32_t)(p[i] & 0x7fff) << 13;
            uint32_t sign = (uint32_t)(p[i] & 0x8000) << 16;
            out[i] = float_of(bits_of(float_of(magnitude) * 0x1p112f) | sign);
        }
    }
}

static TARGET int NAME(all_finite)(const void *x, int dtype, size_t n)
{
    /* Blocks, so that a tensor with an early infinity is not read to its end. */
    for (size_t start = 0; start < n; start += FEC_CHUNK) {
        size_t len = n - start < FEC_CHUNK ? n - start : FEC_CHUNK;
        int bad = 0;
        if (dtype == DTYPE_FLOAT32) {
            const float *p = (const float *)x + start;
            for (size_t i = 0; i < len; i++)
                bad |= (bits_of(p[i]) & 0x7fffffffu) > 0x7f7fffffu;
        } else if (dtype == DTYPE_FLOAT64) {
            const double *p = (const double *)x + start;
            for (size_t i = 0; i < len; i++)
                bad |= (bits_of((float)p[i]) & 0x7fffffffu) > 0x7f7fffffu;
        } else {
            const uint16_t *p = (const uint16_t *)x + start;
            uint16_t last = dtype == DTYPE_FLOAT16 ? 0x7bff : 0x7f7f;
            for (size_t i = 0; i < len; i++) bad |= (uint16_t)(p[i] & 0x7fff) > last;
        }
        if (bad) return 0;
    }
    return 1;
}

/* ---- runs of zero bytes ------------------------------------------------------------------
 * A stream is a list of tokens: (r, b) with r < 255 is r zero bytes and the byte b != 0;
 * 255 alone is 255 zero bytes. Zeros at the end of the plane are not written. */

static TARGET size_t NAME(pack_runs)(const uint8_t *plane, size_t n, uint8_t *out)
{
    /* Returns the length, or n when the stream would not be shorter than the plane. */
    size_t used = 0, run = 0;
    for (size_t i = 0; i < n; i++) {
        if (!plane[i]) { run++; continue; }
        size_t need = run / 255 + 2;
        if (used + need >= n) return n;
        memset(out + used, 255, need - 2);
        out[used + need - 2] = (uint8_t)(run % 255);
        out[used + need - 1] = plane[i];
        used += need;
        run = 0;
    }
    return used;
}

/* The checks of both planes differ only in the error they report. */
static TARGET int NAME(unpack_runs)(const uint8_t *in, size_t in_len, uint8_t *plane, size_t n)
{
    /* 0, or 1 for an overrun, 2 for a zero literal or a run at the end. */
    size_t at = 0;
    memset(plane, 0, n);
    for (size_t i = 0; i < in_len;) {
        unsigned run = in[i++];
        if (run == 255) {
            at += 255;
            if (i == in_len) return 2;
            continue;
        }
        at += run;
        if (i == in_len) return 2;
        if (at >= n) return 1;
        if (!in[i]) return 2;
        plane[at++] = in[i++];
    }
    return 0;
}

/* ---- FEC encode -------------------------------------------------------------------------- */

#define FEC_BLOCK 2048

/* v = x + r (r may be NULL) for n values. Every v that is kept goes to the list: its bits to
 * value[], its index plus `base` to position[]; r becomes v - decoded. Returns the list's length.
 * The list must have room for n and one vector more. */
static TARGET size_t NAME(select)(const float *restrict x, float *restrict r, size_t n,
                                  float smallest, int32_t base, uint32_t *restrict value,
                                  int32_t *restrict position)
{
    const uint32_t lowest = bits_of(smallest), first = fec_first(smallest);
    const uint32_t top = first + (14u << 23); /* what code 15 decodes to */
    size_t k = 0, i = 0;
#if defined(VECTOR512)
    const __m512i magnitude_bits = _mm512_set1_epi32(0x7fffffff);
    const __m512i exponent_bits = _mm512_set1_epi32(0x7f800000);
    const __m512i vfirst = _mm512_set1_epi32((int)first);
    const __m512i largest = _mm512_set1_epi32(0x7f7fffff);
    const __m512i vlowest = _mm512_set1_epi32((int)lowest), vtop = _mm512_set1_epi32((int)top);
    __m512i at = _mm512_add_epi32(_mm512_set1_epi32(base),
                                  _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                                    14, 15));
    for (; i + 16 <= n; i += 16) {
        __m512 sum = _mm512_loadu_ps(x + i);
        if (r) sum = _mm512_add_ps(sum, _mm512_loadu_ps(r + i));
        __m512i v = _mm512_castps_si512(sum);
        __m512i a = _mm512_min_epu32(_mm512_and_si512(v, magnitude_bits), largest);
        v = _mm512_ternarylogic_epi32(magnitude_bits, a, v, 0xca); /* a with v's sign */
        __mmask16 keep = _mm512_cmpge_epu32_mask(a, vlowest);
        if (r) {
            __m512i octave = _mm512_and_si512(_mm512_sub_epi32(a, vlowest), exponent_bits);
            __m512i d = _mm512_min_epu32(_mm512_add_epi32(vfirst, octave), vtop);
            d = _mm512_ternarylogic_epi32(magnitude_bits, d, v, 0xca);
            sum = _mm512_castsi512_ps(v);
            _mm512_storeu_ps(r + i, _mm512_mask_sub_ps(sum, keep, sum, _mm512_castsi512_ps(d)));
        }
        _mm512_storeu_si512(value + k, _mm512_maskz_compress_epi32(keep, v));
        _mm512_storeu_si512(position + k, _mm512_maskz_compress_epi32(keep, at));
        k += (size_t)__builtin_popcount(keep);
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
#elif defined(VECTOR256)
    const __m256i magnitude_bits = _mm256_set1_epi32(0x7fffffff);
    const __m256i exponent_bits = _mm256_set1_epi32(0x7f800000);
    const __m256i vfirst = _mm256_set1_epi32((int)first), vlowest = _mm256_set1_epi32((int)lowest);
    const __m256i largest = _mm256_set1_epi32(0x7f7fffff);
    const __m256i below = _mm256_set1_epi32((int)lowest - 1), vtop = _mm256_set1_epi32((int)top);
    for (; i + 8 <= n; i += 8) {
        __m256 sum = _mm256_loadu_ps(x + i);
        if (r) sum = _mm256_add_ps(sum, _mm256_loadu_ps(r + i));
        __m256i v = _mm256_castps_si256(sum);
        __m256i a = _mm256_min_epu32(_mm256_and_si256(v, magnitude_bits), largest);
        __m256i sign = _mm256_andnot_si256(magnitude_bits, v);
        v = _mm256_or_si256(a, sign);
        __m256i keep = _mm256_cmpgt_epi32(a, below);
        unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(keep));
        if (r) {
            __m256i octave = _mm256_and_si256(_mm256_sub_epi32(a, vlowest), exponent_bits);
            __m256i d = _mm256_min_epu32(_mm256_add_epi32(vfirst, octave), vtop);
            d = _mm256_or_si256(d, sign);
            d = _mm256_and_si256(d, keep);
            _mm256_storeu_ps(r + i, _mm256_sub_ps(_mm256_castsi256_ps(v), _mm256_castsi256_ps(d)));
        }
        __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&compress8[mask]));
        _mm256_storeu_si256((__m256i *)(value + k), _mm256_permutevar8x32_epi32(v, order));
        _mm256_storeu_si256((__m256i *)(position + k),
                            _mm256_add_epi32(order, _mm256_set1_epi32(base + (int32_t)i)));
        k += (size_t)__builtin_popcount(mask);
    }
#endif
    for (; i < n; i++) {
        uint32_t b = bits_of(r ? x[i] + r[i] : x[i]);
        uint32_t sign = b & 0x80000000u, a = b & 0x7fffffffu;
        a = a > 0x7f7fffffu ? 0x7f7fffffu : a; /* a sum beyond float32 saturates */
        uint32_t keep = a >= lowest;
        if (r) {
            uint32_t d = first + ((a - lowest) & 0x7f800000u);
            d = (d > top ? top : d) | sign;
            r[i] = float_of(a | sign) - float_of(keep ? d : 0);
        }
        value[k] = a | sign;
        position[k] = base + (int32_t)i;
        k += keep;
    }
    return k;
}

/* The 4-bit codes of the kept values of one chunk, in order. Returns how many of these are well
 * above the smallest kept magnitude: by a quarter of its power of two. */
static TARGET uint32_t NAME(codes_of)(const uint32_t *restrict value, size_t k, float smallest,
                                      uint8_t *restrict code)
{
    const uint32_t lowest = bits_of(smallest);
    uint32_t above = 0;
    for (size_t i = 0; i < k; i++) {
        uint32_t over = (value[i] & 0x7fffffffu) - lowest, c = (over >> 23) + 1;
        code[i] = (uint8_t)(c > 15 ? 15 : c);
        above += over >= 1u << 21;
    }
    return above;
}

static TARGET void NAME(signs_of)(const uint32_t *value, size_t k, uint8_t *signs)
{
    /* value[] is readable and meaningless up to the next multiple of 8 */
    for (size_t i = 0; i < k; i += 8) {
        uint32_t bits = 0;
        for (unsigned j = 0; j < 8; j++) bits |= (value[i + j] >> 31) << j;
        signs[i / 8] = (uint8_t)bits;
    }
    if (k & 7) signs[k / 8] &= (uint8_t)((1u << (k & 7)) - 1);
}

/* Tokens of the list's entries i..k-1, appended to `out`, which has `used` bytes. An entry that
 * completes the byte of the one before it has been written with that. */
static TARGET size_t NAME(code_tokens)(const uint8_t *code, const int32_t *position, size_t i,
                                       size_t k, uint8_t *out, size_t used, size_t plane_len)
{
    for (; i < k; i++) {
        int32_t at = position[i] >> 1, before = position[(ptrdiff_t)i - 1] >> 1;
        if (at == before) continue;
        size_t run = (size_t)(at - before - 1);
        unsigned byte = (unsigned)code[i] << (4 * (position[i] & 1));
        if (position[i + 1] >> 1 == at) byte |= (unsigned)code[i + 1] << 4;
        if (used + run / 255 + 2 >= plane_len) return plane_len;
        for (; run >= 255; run -= 255) out[used++] = 255;
        out[used] = (uint8_t)run;
        out[used + 1] = (uint8_t)byte;
        used += 2;
    }
    return used;
}

/* Zero-run stream of the code plane, straight from the list. Returns its length, or plane_len when
 * it would not be shorter. `code` and `position` have one entry before the first and one vector
 * after the last (see fec_encode_chunk); `out` has room for plane_len bytes and one vector. */
static TARGET size_t NAME(code_stream)(const uint8_t *code, const int32_t *position, size_t k,
                                       uint8_t *out, size_t plane_len)
{
    size_t used = 0, i = 0;
#ifdef VECTOR512
    /* Sixteen entries at a time: a byte of the plane starts where an entry's byte differs from the
     * one before, and takes in the next entry if that is the same byte's other nibble. */
    const __m512i one = _mm512_set1_epi32(1);
    while (i + 16 <= k && used + 32 < plane_len) {
        __m512i p = _mm512_loadu_si512(position + i);
        __m512i after = _mm512_loadu_si512(position + i + 1);
        __m512i at = _mm512_srai_epi32(p, 1);
        __m512i before = _mm512_srai_epi32(_mm512_loadu_si512(position + i - 1), 1);
        __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(code + i)));
        __m512i c2 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(code + i + 1)));
        __mmask16 first = _mm512_cmpneq_epi32_mask(at, before);
        __mmask16 pair = _mm512_cmpeq_epi32_mask(_mm512_srai_epi32(after, 1), at);
        __m512i run = _mm512_sub_epi32(_mm512_sub_epi32(at, before), one);
        if (_mm512_mask_cmpge_epi32_mask(first, run, _mm512_set1_epi32(255))) {
            size_t end = i + 16;
            used = NAME(code_tokens)(code, position, i, end, out, used, plane_len);
            if (used == plane_len) return plane_len;
            i = end;
            continue;
        }
        __m512i byte = _mm512_sllv_epi32(c, _mm512_slli_epi32(_mm512_and_si512(p, one), 2));
        byte = _mm512_mask_or_epi32(byte, pair, byte, _mm512_slli_epi32(c2, 4));
        __m512i token = _mm512_or_si512(run, _mm512_slli_epi32(byte, 8));
        token = _mm512_maskz_compress_epi32(first, token);
        _mm256_storeu_si256((__m256i *)(out + used), _mm512_cvtepi32_epi16(token));
        used += 2 * (size_t)__builtin_popcount(first);
        i += 16;
    }
#endif
    return NAME(code_tokens)(code, position, i, k, out, used, plane_len);
}

/* One chunk. The lengths of its two streams go to lengths[0..1]; its values add to the total. */
static TARGET void NAME(fec_encode_chunk)(const void *x, int dtype, size_t start, float *r,
                                          size_t n, float lowest, uint8_t *out, uint8_t *signs_out,
                                          uint16_t *lengths, fec_sizes *total)
{
    uint32_t value[FEC_CHUNK + 16];
    int32_t positions[FEC_CHUNK + 33], *position = positions + 1;
    uint8_t code[FEC_CHUNK + 32], signs[FEC_CHUNK / 8], stream[FEC_CHUNK / 2 + 32];
    float block[FEC_BLOCK];
    size_t k = 0;

    if (dtype == DTYPE_FLOAT32) {
        k = NAME(select)((const float *)x + start, r ? r + start : NULL, n, lowest, 0, value,
                         position);
    } else {
        for (size_t at = 0; at < n; at += FEC_BLOCK) {
            size_t len = n - at < FEC_BLOCK ? n - at : FEC_BLOCK;
            NAME(to_float)(x, dtype, start + at, len, block);
            k += NAME(select)(block, r ? r + start + at : NULL, len, lowest, (int32_t)at,
                              value + k, position + k);
        }
    }
    memset(value + k, 0, 8 * sizeof *value);
    total->kept += k;
    total->above += NAME(codes_of)(value, k, lowest, code);
    NAME(signs_of)(value, k, signs);

    const size_t plane_len = (n + 1) / 2, sign_len = (k + 7) / 8;
    position[-1] = -1;           /* byte -1 of the plane: the first run counts from there */
    position[k] = 2 * FEC_CHUNK; /* no nibble of the last byte */
    size_t used = NAME(code_stream)(code, position, k, stream, plane_len);
    if (used == plane_len) {
        memset(stream, 0, plane_len);
        for (size_t i = 0; i < k; i++)
            stream[position[i] >> 1] |= (uint8_t)(code[i] << (4 * (position[i] & 1)));
    }
    memcpy(out, stream, used);
    size_t packed = NAME(pack_runs)(signs, sign_len, signs_out);
    if (packed == sign_len) memcpy(signs_out, signs, sign_len);
    lengths[0] = (uint16_t)used;
    lengths[1] = (uint16_t)packed;
}

static TARGET fec_sizes NAME(fec_encode)(const void *x, int dtype, float *residual, size_t n,
                                         float lowest, uint8_t *codes, uint8_t *signs,
                                         uint16_t *table)
{
    fec_sizes total = {0, 0, 0, 0};
    for (size_t start = 0; start < n; start += FEC_CHUNK) {
        size_t len = n - start < FEC_CHUNK ? n - start : FEC_CHUNK;
        NAME(fec_encode_chunk)(x, dtype, start, residual, len, lowest, codes + total.codes,
                               signs + total.signs, table, &total);
        total.codes += table[0];
        total.signs += table[1];
        table += 2;
    }
    return total;
}

/* ---- FEC decode -------------------------------------------------------------------------- */

static TARGET unsigned NAME(nibbles_set)(uint8_t b) { return ((b & 15) != 0) + ((b >> 4) != 0); }

/* Whether a code stream is nothing but pairs of a run below 255 and a literal, all within the first
 * `room` bytes of the plane: then *kept is what it keeps. Without branches, so that it is fast. */
static TARGET int NAME(pairs_in)(const uint8_t *codes, size_t codes_len, size_t room, size_t *kept)
{
    uint32_t bytes = 0, bad = codes_len & 1, nibbles = 0;
    for (size_t i = 0; i < codes_len / 2; i++) {
        uint16_t token;
        memcpy(&token, codes + 2 * i, 2);
        bytes += (token & 255) + 1u;
        bad += (token & 255) == 255;
        bad += token < 256;
        nibbles += (token & 0x0f00) != 0;
        nibbles += (token & 0xf000) != 0;
    }
    if (bad || bytes > room) return 0;
    *kept = nibbles;
    return 1;
}

/* Checks one chunk and counts what it keeps. */
static TARGET int NAME(fec_check_chunk)(const uint8_t *codes, size_t codes_len,
                                        const uint8_t *signs, size_t signs_len, size_t n,
                                        uint64_t *kept)
{
    const size_t plane_len = (n + 1) / 2;
    size_t k = 0;
    if (codes_len > plane_len) return FEC_CODES_TOO_LONG;
    if (codes_len == plane_len) {
        for (size_t i = 0; i < plane_len; i++) k += NAME(nibbles_set)(codes[i]);
        if ((n & 1) && codes[plane_len - 1] >> 4) return FEC_CODES_PADDING;
    } else if (NAME(pairs_in)(codes, codes_len, plane_len - (n & 1), &k)) {
        /* the common case, and sound */
    } else {
        size_t at = 0, i = 0;
        while (i < codes_len) {
            unsigned run = codes[i++];
            if (i == codes_len) return FEC_CODES_ZERO;
            at += run;
            if (run == 255) continue;
            if (at >= plane_len) return FEC_CODES_OVERRUN;
            if (!codes[i]) return FEC_CODES_ZERO;
            k += NAME(nibbles_set)(codes[i++]);
            at++;
        }
        if ((n & 1) && at == plane_len && codes[codes_len - 1] >> 4) return FEC_CODES_PADDING;
    }
    *kept += k;

    const size_t sign_len = (k + 7) / 8;
    uint8_t last = 0;
    if (signs_len > sign_len) return FEC_SIGNS_TOO_LONG;
    if (signs_len == sign_len) {
        if (sign_len) last = signs[sign_len - 1];
    } else {
        size_t at = 0, i = 0;
        while (i < signs_len) {
            unsigned run = signs[i++];
            if (i == signs_len) return FEC_SIGNS_ZERO;
            at += run;
            if (run == 255) continue;
            if (at >= sign_len) return FEC_SIGNS_OVERRUN;
            if (!signs[i]) return FEC_SIGNS_ZERO;
            last = ++at == sign_len ? signs[i] : 0;
            i++;
        }
    }
    if ((k & 7) && last >> (k & 7)) return FEC_SIGNS_PADDING;
    return FEC_OK;
}

static TARGET int NAME(fec_check)(const uint8_t *codes, size_t codes_len, const uint8_t *signs,
                                  size_t signs_len, const uint16_t *table, size_t n,
                                  size_t *bad_chunk, uint64_t *kept)
{
    size_t chunk = 0;
    *kept = 0;
    for (size_t start = 0; start < n; start += FEC_CHUNK, chunk++, table += 2) {
        size_t len = n - start < FEC_CHUNK ? n - start : FEC_CHUNK;
        int status = table[0] <= codes_len && table[1] <= signs_len
                         ? NAME(fec_check_chunk)(codes, table[0], signs, table[1], len, kept)
                         : FEC_LENGTHS;
        if (status != FEC_OK) {
            *bad_chunk = chunk;
            return status;
        }
        codes += table[0];
        codes_len -= table[0];
        signs += table[1];
        signs_len -= table[1];
    }
    *bad_chunk = chunk;
    return codes_len || signs_len ? FEC_LENGTHS : FEC_OK;
}

/* The kept values of a checked chunk, in order: position in the low half of an entry, code in the
 * high half. Asks for their places in `out` meanwhile: in a sparse tensor these are too far apart
 * for the hardware to guess. Returns their number; the list needs room for n and one entry more. */
static TARGET size_t NAME(kept_of)(const uint8_t *codes, size_t codes_len, size_t n,
                                   const float *out, uint32_t *restrict entry)
{
    size_t k = 0;
    if (codes_len == (n + 1) / 2) {
        for (size_t i = 0; i < n; i++) {
            uint32_t code = (codes[i / 2] >> (4 * (i & 1))) & 15;
            entry[k] = (uint32_t)i | code << 16;
            k += code != 0;
        }
        return k;
    }
    uint32_t at = 0;
    for (size_t i = 0; i < codes_len;) {
        unsigned run = codes[i++];
        at += 2 * run;
        if (run == 255) continue;
        unsigned lo = codes[i] & 15, hi = codes[i] >> 4;
        i++;
        __builtin_prefetch(out + at, 1, 2);
        /* both entries are written, the second counts only if both nibbles are set: no branch */
        entry[k] = lo ? at | lo << 16 : (at + 1) | hi << 16;
        entry[k + 1] = (at + 1) | hi << 16;
        k += 1 + ((lo != 0) & (hi != 0));
        at += 2;
    }
    return k;
}

/* Only after fec_check said FEC_OK for the same bytes. */
static TARGET void NAME(fec_decode_chunk)(const uint8_t *codes, size_t codes_len,
                                          const uint8_t *signs, size_t signs_len, size_t n,
                                          const float *lut, float *out)
{
    uint32_t entry[FEC_CHUNK + 1];
    uint8_t expanded[FEC_CHUNK / 8];
    const size_t k = NAME(kept_of)(codes, codes_len, n, out, entry);

    if (signs_len < (k + 7) / 8) {
        NAME(unpack_runs)(signs, signs_len, expanded, (k + 7) / 8);
        signs = expanded;
    }
    for (size_t i = 0; i < k; i++) {
        unsigned sign = (signs[i >> 3] >> (i & 7)) & 1;
        out[entry[i] & 0xffff] += lut[sign << 4 | entry[i] >> 16];
    }
}

static TARGET void NAME(fec_decode_add)(const uint8_t *codes, const uint8_t *signs,
                                        const uint16_t *table, size_t n, float lowest,
                                        float scale, float *out)
{
    float lut[32];
    fec_values(fec_first(lowest), scale, lut);
    for (size_t start = 0; start < n; start += FEC_CHUNK, table += 2) {
        size_t len = n - start < FEC_CHUNK ? n - start : FEC_CHUNK;
        NAME(fec_decode_chunk)(codes, table[0], signs, table[1], len, lut, out + start);
        codes += table[0];
        signs += table[1];
    }
}
