/* What the source files share: names by instruction set, the table of kernels, threads, bits.
 *
 * The kernel files are compiled once per instruction set with another DPQ_VARIANT; dispatch.c picks
 * one set at run time.
 */
#ifndef DPQ_INTERNAL_H
#define DPQ_INTERNAL_H

#include <stddef.h>
#include <string.h>

#include "dpq.h"

#ifndef DPQ_VARIANT
#define DPQ_VARIANT baseline
#endif
#define DPQ_JOIN_(a, b) a##_##b
#define DPQ_JOIN(a, b) DPQ_JOIN_(a, b)
#define DPQ_NAME(name) DPQ_JOIN(name, DPQ_VARIANT)

#define DPQ_TILE 256 /* groups whose codes are unpacked at once, a multiple of 8 */
#define DPQ_LANES 16 /* rows of h at once */
#define DPQ_MAX_THREADS 64

/* One worker's share [start, end) of a call; returns what the call would return. */
typedef int64_t (*dpq_work)(const void *job, int64_t start, int64_t end);

/* Run `work` over [0, count) in up to `threads` threads, each with at least `grain` items. The result
 * is that of the first share that failed, or 0. */
int64_t dpq_parallel(dpq_work work, const void *job, int64_t count, int64_t grain, int32_t threads);

typedef struct {
    const dpq_table *table;
    const uint8_t *indices;
    uint8_t *out;
    int32_t index_bytes;
    int32_t widened; /* float16 go into the second half of a float32 row, for dpq_widen_row */
} dpq_lookup_job;

typedef struct {
    const dpq_table *table;
    const float *h; /* (D * size, width): `lanes` rows of h, side by side */
    float *partial; /* the sums of h with the value rows of groups [from, to) */
    int64_t from, to;
    int64_t lanes;
    int64_t width; /* 1 or DPQ_LANES */
    int64_t group_pitch, code_pitch, lane_pitch; /* of partial, in floats */
} dpq_partial_job;

typedef struct {
    const dpq_table *table;
    const float *partial;
    float *out; /* (lanes, n), rows out_pitch floats apart */
    int64_t out_pitch;
    int64_t from, to;
    int64_t lanes;
    int64_t width; /* floats per code in partial; unused by the permuting kernel */
    int64_t pitch; /* floats per group in partial */
} dpq_logits_job;

#define DPQ_CHUNK 512 /* points whose squared distances are one sum, whatever the threads */

typedef struct {
    const dpq_clusters *clusters;
    const float *minus_half; /* (G, K): -|centroid|^2 / 2 */
    double *error;           /* (chunks, D), or null */
} dpq_nearest_job;

typedef struct {
    const void *from;
    void *to;
    const uint8_t *bits;
    int64_t D, row_bytes, n;
    int32_t code_bytes;
    int32_t width;
} dpq_packing_job;

/* The kernels of one instruction set. */
typedef struct {
    const char *name;
    int64_t (*check_indices)(const uint8_t *indices, int64_t count, int32_t bytes, int64_t n);
    int64_t (*lookup)(const void *job, int64_t start, int64_t end);
    void (*widen)(uint8_t *row, int64_t d);
    void (*partial)(const dpq_partial_job *job);
    int64_t (*logits)(const void *job, int64_t start, int64_t end);
    int64_t (*logits_permute)(const void *job, int64_t start, int64_t end); /* or null */
    int64_t (*codes)(const void *job, int64_t start, int64_t end);
    int64_t (*softmax)(const void *job, int64_t start, int64_t end); /* of groups */
    int64_t (*nearest)(const void *job, int64_t start, int64_t end); /* of chunks */
    int64_t (*sums)(const void *job, int64_t start, int64_t end);    /* of groups */
    int64_t (*first)(const void *job, int64_t start, int64_t end);   /* of groups */
    int64_t (*unpack)(const void *job, int64_t start, int64_t end);
    int64_t (*pack)(const void *job, int64_t start, int64_t end);
} dpq_kernels;

extern const dpq_kernels dpq_kernels_baseline, dpq_kernels_avx2, dpq_kernels_avx512;

/* Unpack the codes of groups [from, from + count) of one row into bytes or 16-bit numbers. `end` is
 * the end of all packed bytes: nothing is read beyond it. `out` has room for a multiple of 8. */
void DPQ_NAME(dpq_unpack8)(const uint8_t *row, const uint8_t *end, const uint8_t *bits, int32_t width,
                           int64_t from, int64_t count, uint8_t *out);
void DPQ_NAME(dpq_unpack16)(const uint8_t *row, const uint8_t *end, const uint8_t *bits,
                            int32_t width, int64_t from, int64_t count, uint16_t *out);

/* Whether one of the codes of groups [from, from + count) exceeds the largest of its group. The
 * largest of all codes tells at once where groups are even. */
static inline int dpq_exceeds8(const dpq_table *table, const uint8_t *codes, int64_t from,
                               int64_t count) {
    uint8_t top = 0;
    int bad = 0;
    for (int64_t j = 0; j < count; j++) top = codes[j] > top ? codes[j] : top;
    if (top <= table->smallest) return 0;
    for (int64_t j = 0; j < count; j++) bad |= codes[j] > table->last[from + j];
    return bad;
}

static inline int dpq_exceeds16(const dpq_table *table, const uint8_t *codes, int64_t from,
                                int64_t count) {
    int bad = 0;
    for (int64_t j = 0; j < count; j++) {
        uint16_t code;
        memcpy(&code, codes + 2 * j, 2);
        bad |= code > table->last[from + j];
    }
    return bad;
}

static inline int64_t dpq_index(const uint8_t *indices, int64_t i, int32_t bytes) {
    if (bytes == 8) {
        int64_t index;
        memcpy(&index, indices + 8 * i, 8);
        return index;
    }
    int32_t index;
    memcpy(&index, indices + 4 * i, 4);
    return index;
}

static inline float dpq_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, word;
    float value;
    if (rest >= 0x7c00) { /* infinity or NaN */
        word = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        word = sign | ((rest << 13) + 0x38000000);
    } else { /* subnormal: rest * 2^-24 is exact */
        value = (float)rest * 0x1p-24f;
        memcpy(&word, &value, 4);
        word |= sign;
    }
    memcpy(&value, &word, 4);
    return value;
}

static inline int64_t dpq_element_bytes(const dpq_table *table) {
    return table->value_type == DPQ_FLOAT32 ? 4 : 2;
}

/* The first bit of group `from` in a packed row. */
static inline int64_t dpq_bit_of(const uint8_t *bits, int32_t width, int64_t from) {
    if (width) return width * from;
    int64_t bit = 0;
    for (int64_t j = 0; j < from; j++) bit += bits[j];
    return bit;
}

#endif
