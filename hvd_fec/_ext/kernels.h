/* Kernels of hvd_fec: plain C over raw memory, no Python in here.
 *
 * Every routine exists once per instruction set (kernels_template.h); the caller picks
 * one of `kernels_available`. All sets write the same bytes.
 */
#ifndef HVD_FEC_KERNELS_H
#define HVD_FEC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Elements of one independently coded chunk. Its code plane (16 KiB) stays in a first-level cache. */
#define FEC_CHUNK 32768

/* dtype codes of the wire format (docs/wire-format.md) */
enum { DTYPE_FLOAT16 = 1, DTYPE_BFLOAT16 = 2, DTYPE_FLOAT32 = 3, DTYPE_FLOAT64 = 4 };

/* What a malformed FEC chunk can be guilty of. */
enum {
    FEC_OK = 0,
    FEC_CODES_TOO_LONG = 1,  /* a chunk's code stream is longer than its plane */
    FEC_CODES_OVERRUN = 2,   /* its runs and literals leave the plane */
    FEC_CODES_ZERO = 3,      /* a literal is zero, or the stream ends in a run */
    FEC_CODES_PADDING = 4,   /* the unused nibble of an odd chunk is not zero */
    FEC_SIGNS_TOO_LONG = 5,
    FEC_SIGNS_OVERRUN = 6,
    FEC_SIGNS_ZERO = 7,
    FEC_SIGNS_PADDING = 8,   /* bits after the last sign are not zero */
    FEC_LENGTHS = 9          /* the chunk table does not add up to the section lengths */
};

typedef struct {
    size_t codes;   /* bytes of the code section */
    size_t signs;   /* bytes of the sign section */
    uint64_t kept;  /* values kept */
    uint64_t above; /* of these, values well above the smallest kept magnitude */
} fec_sizes;

/* The coded form: elements of one chunk, and why a stream is not sound. */
#define CODED_CHUNK (1u << 20)

enum {
    CODED_OK = 0,
    CODED_ENDS = 1,    /* it ends too early */
    CODED_OUTSIDE = 2, /* a position outside of what it is among */
    CODED_COUNT = 3,   /* a count larger than what it is among */
    CODED_REST = 4     /* bits after the last that are not padding with zeros */
};

/* Ternary: words of one block, values of one conversion, and the most that a word can hold. */
#define TERNARY_LANES 16
#define TERNARY_ROOM 1024
#define TERNARY_DIGITS 40
#define TERNARY_GROUPS 6
/* From here on a single digit leaves no room for its fraction in 32 bits. */
#define TERNARY_MAX_RANKS 16383

/* How sums over `ranks` values in {-1, 0, 1} share a 64-bit word. Digits are read in groups: word
 * = groups by division by `power`, group -> 32-bit fraction of `power`, fraction -> digits by
 * multiplying with `base`. */
typedef struct {
    uint64_t ranks, base, digits;
    uint64_t offset, largest; /* word + offset is 0..largest, with digits 0..2 * ranks */
    uint64_t power, inverse;  /* base**rows; 2**64 / power, rounded down */
    unsigned groups, rows, first_rows; /* digits per group; the first group may have fewer */
    unsigned fraction_bits;
    /* fraction = (group * to_fraction >> fraction_shift) + 1, and so for the first group */
    unsigned fraction_shift, first_fraction_shift;
    uint64_t to_fraction, first_to_fraction;
} ternary_radix;

/* ranks is in 1..TERNARY_MAX_RANKS */
ternary_radix ternary_radix_of(uint64_t ranks);

typedef struct {
    const char *name;
    int (*all_finite)(const void *x, int dtype, size_t n);
    fec_sizes (*fec_encode)(const void *x, int dtype, float *residual, size_t n, float lowest,
                            uint8_t *codes, uint8_t *signs, uint16_t *table);
    int (*fec_check)(const uint8_t *codes, size_t codes_len, const uint8_t *signs,
                     size_t signs_len, const uint16_t *table, size_t n, size_t *bad_chunk,
                     uint64_t *kept);
    void (*fec_decode_add)(const uint8_t *codes, const uint8_t *signs, const uint16_t *table,
                           size_t n, float lowest, float scale, float *out);
    size_t (*pack_runs)(const uint8_t *plane, size_t n, uint8_t *out);
    int (*unpack_runs)(const uint8_t *in, size_t in_len, uint8_t *plane, size_t n);
    size_t (*coded_pack)(const uint8_t *codes, const uint8_t *signs, const uint16_t *table,
                         size_t n, uint32_t *member, uint8_t *code, uint8_t *out,
                         uint32_t *out_table);
    int (*coded_unpack)(const uint8_t *data, size_t len, const uint32_t *table, size_t n,
                        uint32_t *member, uint32_t *entry, size_t *bad_chunk);
    void (*coded_add)(const uint32_t *entry, const uint32_t *table, size_t n, float lowest,
                      float scale, float *out);
    uint32_t (*ternary_survey)(const void *x, int dtype, const float *residual, size_t n,
                               double *squares);
    uint64_t (*ternary_encode)(const void *x, int dtype, float *residual, size_t n, float step,
                               float level, const ternary_radix *radix, int64_t *words);
    uint64_t (*ternary_draw)(const void *x, int dtype, size_t n, float step, uint32_t first,
                             uint64_t key, const ternary_radix *radix, int64_t *words);
    int (*ternary_decode)(const int64_t *words, size_t parts, size_t stride, size_t n,
                          const ternary_radix *radix, float scale, float *out);
} kernel_set;

/* The i-th of the sets that this processor can run, best first; NULL after the last. */
const kernel_set *kernels_available(size_t i);

/* TensorFlow's threads flush denormals to zero. The codecs promise the same bytes everywhere, so
 * each entry point computes with denormals and puts the caller's back. */
unsigned kernels_enter(void);
void kernels_leave(unsigned mode);

#endif
