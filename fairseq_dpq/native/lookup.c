/* Lookup: the value rows of a row's codes, copied one after the other. */
#include "internal.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

#define AHEAD 12 /* rows whose codes are fetched ahead */

/* The position of the first index that is not in [0, n), or -1. */
int64_t DPQ_NAME(dpq_check_indices)(const uint8_t *indices, int64_t count, int32_t bytes, int64_t n) {
    int bad = 0;
    if (bytes == 8) {
        for (int64_t i = 0; i < count; i++) bad |= (uint64_t)dpq_index(indices, i, 8) >= (uint64_t)n;
    } else {
        for (int64_t i = 0; i < count; i++) bad |= (uint64_t)dpq_index(indices, i, 4) >= (uint64_t)n;
    }
    if (!bad) return -1;
    int64_t i = 0;
    while ((uint64_t)dpq_index(indices, i, bytes) < (uint64_t)n) i++;
    return i;
}

static inline uint16_t code16(const uint8_t *codes, int64_t j) {
    uint16_t code;
    memcpy(&code, codes + 2 * j, 2);
    return code;
}

/* Copy the value rows of `count` groups. `bytes`, `wide` and `even` are constants where this is
 * called, so that each case becomes a loop of plain loads and stores. */
static inline __attribute__((always_inline)) void copy(const uint8_t *restrict codes, int wide,
                                                       const uint8_t *values, const int64_t *first,
                                                       int even, int64_t step, int64_t count,
                                                       int64_t bytes, uint8_t *restrict out) {
    const uint8_t *base = values + first[0] * bytes;
    int64_t jump = step * bytes;
#pragma GCC unroll 8
    for (int64_t j = 0; j < count; j++) {
        int64_t code = wide ? code16(codes, j) : codes[j];
        const uint8_t *group = even ? base : values + first[j] * bytes;
        memcpy(out, group + code * bytes, (size_t)bytes);
        out += bytes;
        base += jump;
    }
}

#define CASE(size)                                                                      \
    case size:                                                                          \
        if (wide) {                                                                     \
            if (even) copy(codes, 1, values, first, 1, step, count, size, out);         \
            else copy(codes, 1, values, first, 0, step, count, size, out);              \
        } else {                                                                        \
            if (even) copy(codes, 0, values, first, 1, step, count, size, out);         \
            else copy(codes, 0, values, first, 0, step, count, size, out);              \
        }                                                                               \
        break;

static void copy_groups(const dpq_table *table, const uint8_t *codes, int wide, int64_t from,
                        int64_t count, uint8_t *out) {
    const uint8_t *values = table->values;
    const int64_t *first = table->first + from;
    int even = table->step >= 0;
    int64_t step = table->step;
    int64_t bytes = table->size * dpq_element_bytes(table);
    switch (bytes) {
        CASE(2) CASE(4) CASE(6) CASE(8) CASE(10) CASE(12) CASE(14) CASE(16) CASE(20) CASE(24)
        CASE(32) CASE(48) CASE(64)
        default:
            for (int64_t j = 0; j < count; j++) {
                int64_t code = wide ? code16(codes, j) : codes[j];
                memcpy(out, values + (first[j] + code) * bytes, (size_t)bytes);
                out += bytes;
            }
    }
}

/* The row's codes of groups [from, from + count): in place, or unpacked into `own`. */
static inline const uint8_t *codes_of(const dpq_table *table, const uint8_t *row, int wide,
                                      int64_t from, int64_t count, uint16_t *own) {
    if (table->code_bytes) return row + from * table->code_bytes;
    const uint8_t *end = table->codes + table->n * table->row_bytes;
    if (wide) {
        DPQ_NAME(dpq_unpack16)(row, end, table->bits, table->width, from, count, own);
    } else {
        DPQ_NAME(dpq_unpack8)(row, end, table->bits, table->width, from, count, (uint8_t *)own);
    }
    return (const uint8_t *)own;
}

/* A row of `d` float16 in the second half of its float32 row, widened: what is written never passes
 * what is still to be read. */
void DPQ_NAME(dpq_widen_row)(uint8_t *row, int64_t d) {
    const uint8_t *halves = row + 2 * d;
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= d; i += 8) {
        __m128i eight = _mm_loadu_si128((const __m128i *)(halves + 2 * i));
        _mm256_storeu_ps((float *)(row + 4 * i), _mm256_cvtph_ps(eight));
    }
#endif
    for (; i < d; i++) {
        float value = dpq_half_to_float(code16(halves, i));
        memcpy(row + 4 * i, &value, 4);
    }
}

int64_t DPQ_NAME(dpq_lookup_rows)(const void *argument, int64_t start, int64_t stop) {
    const dpq_lookup_job *job = argument;
    const dpq_table *table = job->table;
    int64_t D = table->D, value_bytes = table->size * dpq_element_bytes(table);
    int wide = table->code_bytes ? table->code_bytes == 2 : table->largest > 255;
    int64_t row_bytes = D * value_bytes * (job->widened ? 2 : 1);
    uint8_t *out = job->out + start * row_bytes;
    int64_t lines = table->row_bytes < 256 ? table->row_bytes : 256;
    for (int64_t i = start; i < stop; i++, out += row_bytes) {
        if (i + AHEAD < stop) {
            int64_t next = dpq_index(job->indices, i + AHEAD, job->index_bytes);
            const uint8_t *row = table->codes + next * table->row_bytes;
            for (int64_t at = 0; at < lines; at += 64) __builtin_prefetch(row + at);
            __builtin_prefetch(row + lines - 1);
        }
        int64_t index = dpq_index(job->indices, i, job->index_bytes);
        if (index == table->padding) {
            memset(out, 0, (size_t)row_bytes);
            continue;
        }
        const uint8_t *row = table->codes + index * table->row_bytes;
        uint8_t *values = out + row_bytes - D * value_bytes;
        for (int64_t from = 0; from < D; from += DPQ_TILE) {
            int64_t count = D - from < DPQ_TILE ? D - from : DPQ_TILE;
            uint16_t own[DPQ_TILE];
            const uint8_t *codes = codes_of(table, row, wide, from, count, own);
            if (table->checked &&
                (wide ? dpq_exceeds16(table, codes, from, count)
                      : dpq_exceeds8(table, codes, from, count))) {
                return 1 + index;
            }
            copy_groups(table, codes, wide, from, count, values + from * value_bytes);
        }
    }
    return 0;
}
