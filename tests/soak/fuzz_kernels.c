/* libFuzzer's target: what the kernels do with a payload's sections, after the checks that Python
 * makes before it calls them. Buffers have the exact sizes, for AddressSanitizer. All instruction
 * sets must agree, to the last bit. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

typedef struct {
    const uint8_t *data;
    size_t size;
} input;

static uint32_t take(input *in, size_t bytes) {
    uint32_t value = 0;
    for (size_t i = 0; i < bytes && in->size; i++, in->size--) value |= (uint32_t)*in->data++ << 8 * i;
    return value;
}

static void *bytes_of(input *in, size_t *len) {
    if (*len > in->size) *len = in->size;
    void *copy = malloc(*len);
    if (*len) memcpy(copy, in->data, *len);
    in->data += *len;
    in->size -= *len;
    return copy;
}

static void agree(const kernel_set *k, void **first, size_t *first_size, void *made, size_t size) {
    if (k == kernels_available(0)) {
        *first = made;
        *first_size = size;
        return;
    }
    if (size != *first_size || (size && memcmp(made, *first, size))) abort();
    free(made);
}

/* A status in front of n floats. */
static float *result(size_t n, int status) {
    float *out = calloc(n + 1, sizeof(float));
    out[n] = (float)status;
    return out;
}

static void *planes(const kernel_set *k, input in, size_t *size) {
    size_t n = 1 + 2 * take(&in, 2), chunks = (n + FEC_CHUNK - 1) / FEC_CHUNK, bad = 0;
    size_t codes_len = take(&in, 2), signs_len = (size_t)-1;
    uint64_t kept = 0;
    uint16_t *table = malloc(4 * chunks);
    for (size_t i = 0; i < 2 * chunks; i++) table[i] = (uint16_t)take(&in, 2);
    uint8_t *codes = bytes_of(&in, &codes_len), *signs = bytes_of(&in, &signs_len);
    int status = k->fec_check(codes, codes_len, signs, signs_len, table, n, &bad, &kept);
    float *out = result(n, status);
    if (!status) {
        unsigned mode = kernels_enter();
        k->fec_decode_add(codes, signs, table, n, 0.25f, -1.5f, out);
        kernels_leave(mode);
    }
    free(table), free(codes), free(signs);
    *size = 4 * (n + 1);
    return out;
}

static void *runs(const kernel_set *k, input in, size_t *size) {
    size_t n = 1 + take(&in, 2), len = (size_t)-1;
    uint8_t *stream = bytes_of(&in, &len), *plane = calloc(n + 1, 1);
    int status = k->unpack_runs(stream, len, plane, n);
    if (status) memset(plane, 0, n);
    plane[n] = (uint8_t)status;
    free(stream);
    *size = n + 1;
    return plane;
}

static void *coded(const kernel_set *k, input in, size_t *size) {
    size_t n = 1 + 24 * take(&in, 2), chunks = (n + CODED_CHUNK - 1) / CODED_CHUNK, bad = 0;
    size_t all = 0, kept = 0, most = 1;
    uint32_t *table = malloc(8 * chunks);
    for (size_t i = 0; i < chunks; i++) {
        size_t left = n - i * CODED_CHUNK, elements = left < CODED_CHUNK ? left : CODED_CHUNK;
        table[2 * i] = take(&in, 2);
        table[2 * i + 1] = take(&in, 2);
        if (table[2 * i + 1] > elements || table[2 * i + 1] > 8 * table[2 * i]) {
            free(table);
            return result(0, -1);
        }
        all += table[2 * i];
        kept += table[2 * i + 1];
        if (table[2 * i + 1] > most) most = table[2 * i + 1];
    }
    if (all != in.size) { /* too long a claim for the input: make it fit the last chunk, if it can */
        size_t before = all - table[2 * chunks - 2];
        if (in.size < before || table[2 * chunks - 1] > 8 * (in.size - before)) {
            free(table);
            return result(0, -1);
        }
        table[2 * chunks - 2] = (uint32_t)(in.size - before);
        all = in.size;
    }
    uint8_t *data = bytes_of(&in, &all);
    uint32_t *member = malloc(4 * most), *entry = malloc(4 * kept);
    int status = k->coded_unpack(data, all, table, n, member, entry, &bad);
    size_t values = status ? 0 : n;
    float *out = result(values, status);
    if (!status && kept) {
        unsigned mode = kernels_enter();
        k->coded_add(entry, table, n, 0.25f, -1.5f, out);
        kernels_leave(mode);
    }
    free(table), free(data), free(member), free(entry);
    *size = 4 * (values + 1);
    return out;
}

static void *ternary(const kernel_set *k, input in, size_t *size) {
    size_t ranks = 1 + take(&in, 2) % 64, parts = 1 + take(&in, 1) % 4, n = 1 + take(&in, 1) * 9;
    ternary_radix radix = ternary_radix_of(ranks);
    size_t stride = (n + radix.digits - 1) / radix.digits;
    int64_t *words = calloc(parts * stride, 8);
    memcpy(words, in.data, in.size < 8 * parts * stride ? in.size : 8 * parts * stride);
    float *out = result(n, 0);
    unsigned mode = kernels_enter();
    int status = k->ternary_decode(words, parts, stride, n, &radix, 0.75f, out);
    kernels_leave(mode);
    if (status) memset(out, 0, 4 * n); /* then it is meaningless */
    out[n] = (float)(status != 0);     /* which of two faults is met first is free */
    free(words);
    *size = 4 * (n + 1);
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    void *(*const targets[])(const kernel_set *, input, size_t *) = {planes, runs, coded, ternary};
    input in = {data, size};
    unsigned target = take(&in, 1) % 4;
    void *first = NULL;
    size_t first_size = 0;
    for (size_t i = 0; kernels_available(i); i++) {
        size_t made_size = 4;
        void *made = targets[target](kernels_available(i), in, &made_size);
        agree(kernels_available(i), &first, &first_size, made, made_size);
    }
    free(first);
    return 0;
}
