/* One copy of the kernels per instruction set, and the choice between them. */
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#endif

static inline uint32_t bits_of(float f)
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}

static inline float float_of(uint32_t b)
{
    float f;
    memcpy(&f, &b, 4);
    return f;
}

/* The wire format is little-endian, and so is every machine that TensorFlow runs on. */
static inline uint64_t load64(const uint8_t *p)
{
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static inline void store64(uint8_t *p, uint64_t w) { memcpy(p, &w, 8); }

/* Bits of what code 1 stands for: 4/3 of the smallest kept magnitude (docs/algorithms.md). Code c
 * stands for 2**(c - 1) times that. */
static uint32_t fec_first(float lowest) { return bits_of((float)(lowest * 4.0 / 3.0)); }

/* lut[sign << 4 | code] = scale times the value that the code stands for; `first` are the bits of
 * that of code 1. */
static void fec_values(uint32_t first, float scale, float *lut)
{
    lut[0] = lut[16] = 0.0f;
    for (unsigned c = 1; c < 16; c++) {
        float value = float_of(first + ((c - 1) << 23)) * scale;
        lut[c] = value;
        lut[16 | c] = -value;
    }
}

/* 2**bits / power as factor * 2**-shift, rounded up, with as many bits as a 32-bit factor has. The
 * fractions of groups then exceed the true ones by less than 1.5 in the last place, and that is
 * too little to change a digit while 2 * power <= 2**bits. */
static unsigned ternary_factor(uint64_t power, unsigned bits, uint64_t *factor)
{
    unsigned shift = 0;
    while (shift + bits < 63 && (1ull << (shift + bits + 1)) / power + 1 <= UINT32_MAX) shift++;
    *factor = (1ull << (shift + bits)) / power + 1;
    return shift;
}

ternary_radix ternary_radix_of(uint64_t ranks)
{
    ternary_radix radix = {.ranks = ranks, .base = 2 * ranks + 1, .groups = 1};
    const uint64_t base = radix.base;
    uint64_t all = 1;
    while (all <= UINT64_MAX / base) {
        all *= base;
        radix.digits++;
    }
    radix.largest = all - 1;
    radix.offset = (all - 1) / 2;
    radix.fraction_bits = 32;
    while (base >> (32 - radix.fraction_bits)) radix.fraction_bits--; /* base < 2**(32 - bits) */
    for (;; radix.groups++) { /* as few groups as leave each fraction exact */
        radix.rows = (unsigned)((radix.digits + radix.groups - 1) / radix.groups);
        radix.power = 1;
        for (unsigned i = 0; i < radix.rows && radix.power >> 32 == 0; i++) radix.power *= base;
        if (radix.power * 2 <= 1ull << radix.fraction_bits) break;
    }
    radix.first_rows = (unsigned)radix.digits - (radix.groups - 1) * radix.rows;
    radix.inverse = UINT64_MAX / radix.power;
    uint64_t first = 1;
    for (unsigned i = 0; i < radix.first_rows; i++) first *= base;
    radix.fraction_shift = ternary_factor(radix.power, radix.fraction_bits, &radix.to_fraction);
    radix.first_fraction_shift =
        ternary_factor(first, radix.fraction_bits, &radix.first_to_fraction);
    return radix;
}

#ifdef X86
#include "compress8.h"
#endif

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define STRING_(a) #a
#define STRING(a) STRING_(a)
#define NAME(x) PASTE(x, NAME_SUFFIX)

#define NAME_SUFFIX baseline
#define TARGET
#define VECTOR_BYTES 16
#include "kernels_template.h"
#include "coded_template.h"
#include "ternary_template.h"
#include "kernel_table.h"
#undef NAME_SUFFIX
#undef TARGET
#undef VECTOR_BYTES

#ifdef X86
#define NAME_SUFFIX avx2
#define VECTOR256
#define VECTOR_BYTES 32
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "kernels_template.h"
#include "coded_template.h"
#include "ternary_template.h"
#include "kernel_table.h"
#undef NAME_SUFFIX
#undef TARGET
#undef VECTOR_BYTES

#undef VECTOR256
#define NAME_SUFFIX avx512
#define VECTOR512
#define VECTOR_BYTES 64
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,popcnt"
#ifdef __clang__ /* ignores an attribute with words that it does not know */
#define TARGET __attribute__((target(AVX512)))
#else
#define TARGET __attribute__((target(AVX512 ",prefer-vector-width=512")))
#endif
#include "kernels_template.h"
#include "coded_template.h"
#include "ternary_template.h"
#include "kernel_table.h"
#undef NAME_SUFFIX
#undef TARGET
#undef VECTOR_BYTES
#endif

const kernel_set *kernels_available(size_t i)
{
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && i-- == 0)
        return &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && i-- == 0)
        return &kernels_avx2;
#endif
    return i == 0 ? &kernels_baseline : NULL;
}

unsigned kernels_enter(void)
{
#ifdef X86
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode & ~0x8040u); /* flush-to-zero and denormals-are-zero off */
    return mode;
#else
    return 0;
#endif
}

void kernels_leave(unsigned mode)
{
#ifdef X86
    _mm_setcsr((_mm_getcsr() & ~0x8040u) | (mode & 0x8040u));
#else
    (void)mode;
#endif
}
