/* Ternary kernels: included once per instruction set by kernels.c, after kernels_template.h, with
 *   NAME(x)       the function name with the set's suffix
 *   TARGET        its target attribute
 *   VECTOR_BYTES  the width of its registers
 *
 * Values travel as digits t in {-1, 0, 1} of 64-bit words (docs/wire-format.md). A block
 * of TERNARY_LANES words holds radix.digits rows of TERNARY_LANES consecutive values, and word l
 * takes lane l of every row, the first row as its most significant digit. So a vector register
 * works on a row, and memory is read in order. What is left after the last whole block makes a
 * block of fewer lanes. */

#define VECTORS (TERNARY_LANES * 4 / VECTOR_BYTES)
#define VECTOR_OF(type, bytes) type __attribute__((vector_size(bytes), aligned(4), may_alias))
#define vfloat NAME(vfloat)
#define vint NAME(vint)
#define vuint NAME(vuint)
#define vdouble NAME(vdouble)
#define vhalf NAME(vhalf)
#define vhalfint NAME(vhalfint)
#define vhalfuint NAME(vhalfuint)
#define vword NAME(vword)
typedef VECTOR_OF(float, VECTOR_BYTES) vfloat;
typedef VECTOR_OF(int32_t, VECTOR_BYTES) vint;
typedef VECTOR_OF(uint32_t, VECTOR_BYTES) vuint;
typedef VECTOR_OF(double, VECTOR_BYTES) vdouble;
typedef VECTOR_OF(float, (VECTOR_BYTES / 2)) vhalf; /* as many lanes as vdouble */
typedef VECTOR_OF(int32_t, (VECTOR_BYTES / 2)) vhalfint;
typedef VECTOR_OF(uint64_t, VECTOR_BYTES) vword;
typedef VECTOR_OF(uint32_t, (VECTOR_BYTES / 2)) vhalfuint;
/* WIDEN: vhalf to vdouble. MULTIPLY_LOW: the product of the low halves of 64-bit lanes. */
#if defined(VECTOR512)
#define WIDEN(v) ((vdouble)_mm512_cvtps_pd((__m256)(v)))
#define MULTIPLY_LOW(a, b) ((vword)_mm512_mul_epu32((__m512i)(a), (__m512i)(b)))
#elif defined(VECTOR256)
#define WIDEN(v) ((vdouble)_mm256_cvtps_pd((__m128)(v)))
#define MULTIPLY_LOW(a, b) ((vword)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#elif defined(X86)
#define WIDEN(v) __builtin_convertvector(v, vdouble)
#define MULTIPLY_LOW(a, b) ((vword)_mm_mul_epu32((__m128i)(a), (__m128i)(b)))
#else
#define WIDEN(v) __builtin_convertvector(v, vdouble)
#define MULTIPLY_LOW(a, b) (((a) & 0xffffffffu) * ((b) & 0xffffffffu))
#endif
#define INLINE static inline __attribute__((always_inline)) TARGET

/* Bits of the largest |v|, v = x + residual, and the sum of v * v over each chunk. A value that is
 * not finite makes the peak infinity or NaN, whose bits are above those of any number. */
static TARGET uint32_t NAME(ternary_survey)(const void *x, int dtype, const float *residual,
                                            size_t n, double *squares)
{
    enum { HALVES = TERNARY_LANES * 8 / VECTOR_BYTES, HALF = VECTOR_BYTES / 8 };
    uint32_t top = 0;
    if (dtype == DTYPE_FLOAT16 && !NAME(all_finite)(x, dtype, n)) top = 0x7f800000u;
    for (size_t start = 0; start < n; start += FEC_CHUNK) {
        size_t len = n - start < FEC_CHUNK ? n - start : FEC_CHUNK;
        float converted[TERNARY_ROOM];
        double sums[TERNARY_LANES];
        vdouble square[HALVES];
        vhalfint peak[HALVES];
        memset(square, 0, sizeof square);
        memset(peak, 0, sizeof peak);
        for (size_t at = 0; at < len; at += TERNARY_ROOM) {
            size_t part = len - at < TERNARY_ROOM ? len - at : TERNARY_ROOM;
            const float *p = (const float *)x + start + at;
            const float *r = residual ? residual + start + at : NULL;
            float padded[TERNARY_LANES] = {0};
            if (dtype != DTYPE_FLOAT32) {
                NAME(to_float)(x, dtype, start + at, part, converted);
                p = converted;
            }
            for (size_t i = 0; i < part; i += TERNARY_LANES) {
                const float *row = p + i, *kept = r ? r + i : NULL;
                if (part - i < TERNARY_LANES) { /* zeros up to the next whole row */
                    for (size_t j = i; j < part; j++) padded[j - i] = r ? p[j] + r[j] : p[j];
                    row = padded;
                    kept = NULL;
                }
                for (int h = 0; h < HALVES; h++) {
                    vhalf v = *(const vhalf *)(row + h * HALF);
                    if (kept) v += *(const vhalf *)(kept + h * HALF);
                    vdouble wide = WIDEN(v);
                    square[h] += wide * wide;
                    vhalfint magnitude = (vhalfint)v & 0x7fffffff;
                    vhalfint larger = magnitude > peak[h];
                    peak[h] = (magnitude & larger) | (peak[h] & ~larger);
                }
            }
        }
        for (int h = 0; h < HALVES; h++)
            for (int i = 0; i < HALF; i++) {
                sums[h * HALF + i] = square[h][i];
                if ((uint32_t)peak[h][i] > top) top = (uint32_t)peak[h][i];
            }
        for (int width = TERNARY_LANES / 2; width; width /= 2)
            for (int i = 0; i < width; i++) sums[i] += sums[i + width];
        squares[start / FEC_CHUNK] = sums[0];
    }
    return top;
}

/* An index, scalar or vector, becomes a number in 0..2**24-1: rounds of shift and multiply with the
 * constants of Chris Wellons' lowbias32, one before and two after the key's second half. */
#define TERNARY_MIX(h, key)                          \
    do {                                             \
        (h) += (uint32_t)(key);                      \
        (h) = ((h) ^ (h) >> 16) * 0x7feb352du;       \
        (h) ^= (uint32_t)((key) >> 32);              \
        (h) = ((h) ^ (h) >> 16) * 0x7feb352du;       \
        (h) = ((h) ^ (h) >> 15) * 0x846ca68bu;       \
        (h) = ((h) ^ (h) >> 16) >> 8;                \
    } while (0)

/* Digits of x + residual into words; see the two callers. */
INLINE uint64_t NAME(ternary_pack)(const void *x, int dtype, float *residual, size_t n, float step,
                                   float level, const int drawn, uint32_t first, uint64_t key,
                                   const ternary_radix *radix, int64_t *words)
{
    const size_t block = (size_t)radix->digits * TERNARY_LANES;
    const uint32_t base = (uint32_t)radix->base;
    const float unit = step * 0x1p-24f;
    float converted[TERNARY_DIGITS * TERNARY_LANES];
    uint64_t kept = 0;
    size_t start = 0;
    vint count[VECTORS];
    vuint index[VECTORS];
    memset(count, 0, sizeof count);
    for (int v = 0; v < VECTORS; v++)
        for (int i = 0; i < VECTOR_BYTES / 4; i++)
            index[v][i] = first + (uint32_t)(v * (VECTOR_BYTES / 4) + i);
    for (; start + block <= n; start += block, words += TERNARY_LANES) {
        const float *p = (const float *)x + start;
        float *r = residual ? residual + start : NULL;
        int64_t word[TERNARY_LANES] = {0};
        if (dtype != DTYPE_FLOAT32) {
            NAME(to_float)(x, dtype, start, block, converted);
            p = converted;
        }
        for (unsigned g = 0; g < radix->groups; g++) {
            const unsigned rows = g ? radix->rows : radix->first_rows;
            vuint digits[VECTORS];
            memset(digits, 0, sizeof digits);
            for (unsigned row = 0; row < rows; row++, p += TERNARY_LANES) {
                for (int v = 0; v < VECTORS; v++) {
                    const size_t at = (size_t)v * (VECTOR_BYTES / 4);
                    vfloat value = *(const vfloat *)(p + at);
                    vint up, down;
                    if (drawn) {
                        vuint h = index[v];
                        TERNARY_MIX(h, key);
                        vfloat bound = __builtin_convertvector((vint)h, vfloat) * unit;
                        up = value > bound;
                        down = value < -bound;
                        index[v] += TERNARY_LANES;
                    } else {
                        if (r) value += *(const vfloat *)(r + at);
                        up = value >= level;
                        down = value <= -level;
                    }
                    vint t = down - up; /* true is -1 */
                    if (r)
                        *(vfloat *)(r + at) = value - __builtin_convertvector(t, vfloat) * step;
                    digits[v] = digits[v] * base + (vuint)t;
                    count[v] -= up | down;
                }
                if (r) r += TERNARY_LANES;
            }
            int32_t group[TERNARY_LANES];
            memcpy(group, digits, sizeof group);
            for (int i = 0; i < TERNARY_LANES; i++)
                word[i] = word[i] * (int64_t)radix->power + group[i];
        }
        memcpy(words, word, sizeof word);
    }
    for (int v = 0; v < VECTORS; v++)
        for (int i = 0; i < VECTOR_BYTES / 4; i++) kept += (uint32_t)count[v][i];

    const size_t rest = n - start, lanes = (rest + radix->digits - 1) / radix->digits;
    if (rest) NAME(to_float)(x, dtype, start, rest, converted);
    for (size_t l = 0; l < lanes; l++) {
        int64_t word = 0;
        for (size_t d = 0, i = l; d < radix->digits; d++, i += lanes) {
            word *= base;
            if (i >= rest) continue;
            float value = converted[i];
            int t;
            if (drawn) {
                uint32_t h = first + (uint32_t)(start + i);
                TERNARY_MIX(h, key);
                float bound = (float)h * unit;
                t = (value > bound) - (value < -bound);
            } else {
                if (residual) value += residual[start + i];
                t = (value >= level) - (value <= -level);
                if (residual) residual[start + i] = value - (float)t * step;
            }
            kept += t != 0;
            word += t;
        }
        words[l] = word;
    }
    return kept;
}

/* t = sign(v) where |v| >= level, v = x + residual (or NULL); the residual becomes v - t * step.
 * Returns how many t are not zero. */
static TARGET uint64_t NAME(ternary_encode)(const void *x, int dtype, float *residual, size_t n,
                                            float step, float level, const ternary_radix *radix,
                                            int64_t *words)
{
    return NAME(ternary_pack)(x, dtype, residual, n, step, level, 0, 0, 0, radix, words);
}

/* t = sign(x) with probability |x| / step. `first` is the index of x[0] in its tensor. */
static TARGET uint64_t NAME(ternary_draw)(const void *x, int dtype, size_t n, float step,
                                          uint32_t first, uint64_t key, const ternary_radix *radix,
                                          int64_t *words)
{
    return NAME(ternary_pack)(x, dtype, NULL, n, step, 0, 1, first, key, radix, words);
}

/* High half of a * b, for b in two halves of 32 bits. */
INLINE vword NAME(high_product)(vword a, vword b_low, vword b_high)
{
    const vword a_high = a >> 32;
    const vword middle = MULTIPLY_LOW(a_high, b_low) + (MULTIPLY_LOW(a, b_low) >> 32);
    const vword other = MULTIPLY_LOW(a, b_high) + (middle & 0xffffffffu);
    return MULTIPLY_LOW(a_high, b_high) + (middle >> 32) + (other >> 32);
}

/* One block of words to the fractions that its groups' digits are read off. Returns nonzero if a
 * word is not a sum of `ranks` digits per place. */
INLINE int NAME(ternary_split)(const int64_t *words, const ternary_radix *radix,
                               uint32_t fraction[TERNARY_GROUPS][TERNARY_LANES])
{
    enum { WORDS = VECTOR_BYTES / 8 };
    const vword zero = {0};
    const vword power = zero + radix->power, largest = zero + radix->largest;
    const vword inverse_low = zero + (uint32_t)radix->inverse;
    const vword inverse_high = zero + (radix->inverse >> 32);
    const vword scale = zero + radix->to_fraction, first_scale = zero + radix->first_to_fraction;
    const int shift = (int)radix->fraction_shift, first_shift = (int)radix->first_fraction_shift;
    vword bad = zero;
    for (int i = 0; i < TERNARY_LANES; i += WORDS) {
        vword word = *(const vword *)(words + i) + radix->offset;
        bad |= (vword)(word > largest);
        for (unsigned g = radix->groups - 1; g; g--) {
            vword quotient = NAME(high_product)(word, inverse_low, inverse_high);
            /* the inverse is rounded down, so the quotient may be short by one */
            vword group = (word - MULTIPLY_LOW(quotient, power)) & 0xffffffffu;
            vword more = (vword)(group >= power);
            group -= power & more;
            vword f = (MULTIPLY_LOW(group, scale) >> shift) + 1;
            *(vhalfuint *)(fraction[g] + i) = __builtin_convertvector(f, vhalfuint);
            word = quotient - more;
        }
        vword f = (MULTIPLY_LOW(word, first_scale) >> first_shift) + 1;
        *(vhalfuint *)(fraction[0] + i) = __builtin_convertvector(f, vhalfuint);
    }
    uint64_t any = 0;
    for (int i = 0; i < WORDS; i++) any |= bad[i];
    return any != 0;
}

/* out = scale * (sum of the digits of `parts` arrays of words, `stride` apart). Returns 0, 1 if a
 * word is too large, 2 if a digit beyond the last value is not zero; then out is meaningless. */
static TARGET int NAME(ternary_decode)(const int64_t *words, size_t parts, size_t stride, size_t n,
                                       const ternary_radix *radix, float scale, float *out)
{
    const size_t block = (size_t)radix->digits * TERNARY_LANES;
    const uint32_t base = (uint32_t)radix->base, low = (1u << radix->fraction_bits) - 1;
    const int shift = (int)radix->fraction_bits;
    const int32_t zero = (int32_t)(radix->ranks * parts);
    uint32_t fraction[TERNARY_GROUPS][TERNARY_LANES];
    uint32_t sums[TERNARY_DIGITS * TERNARY_LANES];
    size_t start = 0;
    int bad = 0;
    for (; start + block <= n; start += block, words += TERNARY_LANES) {
        for (size_t part = 0; part < parts; part++) {
            uint32_t *sum = sums;
            float *o = out + start;
            bad |= NAME(ternary_split)(words + part * stride, radix, fraction);
            for (unsigned g = 0; g < radix->groups; g++) {
                const unsigned rows = g ? radix->rows : radix->first_rows;
                vuint f[VECTORS];
                memcpy(f, fraction[g], sizeof f);
                for (unsigned row = 0; row < rows; row++) {
                    for (int v = 0; v < VECTORS; v++) {
                        const size_t at = (size_t)v * (VECTOR_BYTES / 4);
                        vuint digit = f[v] * base;
                        f[v] = digit & low;
                        digit >>= shift;
                        if (part) digit += *(vuint *)(sum + at);
                        if (part + 1 < parts)
                            *(vuint *)(sum + at) = digit;
                        else
                            *(vfloat *)(o + at) =
                                __builtin_convertvector((vint)digit - zero, vfloat) * scale;
                    }
                    sum += TERNARY_LANES;
                    o += TERNARY_LANES;
                }
            }
        }
    }
    if (bad) return 1;

    const size_t rest = n - start, lanes = (rest + radix->digits - 1) / radix->digits;
    memset(sums, 0, sizeof sums);
    for (size_t part = 0; part < parts; part++)
        for (size_t l = 0; l < lanes; l++) {
            uint64_t word = (uint64_t)words[part * stride + l] + radix->offset;
            if (word > radix->largest) return 1;
            for (size_t d = radix->digits; d--; word /= base) {
                uint32_t digit = (uint32_t)(word % base);
                if (d * lanes + l < rest)
                    sums[d * lanes + l] += digit;
                else if (digit != radix->ranks)
                    return 2;
            }
        }
    for (size_t i = 0; i < rest; i++) out[start + i] = (float)((int32_t)sums[i] - zero) * scale;
    return 0;
}

#undef VECTORS
#undef VECTOR_OF
#undef vfloat
#undef vint
#undef vuint
#undef vdouble
#undef vhalf
#undef vhalfint
#undef vhalfuint
#undef vword
#undef MULTIPLY_LOW
#undef WIDEN
#undef INLINE
#undef TERNARY_MIX
