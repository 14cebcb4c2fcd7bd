/* Logits straight from codes. The products of h with each value row are summed once per group
 * (`partial`); a logit is the sum of D of these, picked by the row's codes, group after group, so that
 * every kernel here gives the same bits. */
#include "internal.h"

static inline __attribute__((always_inline)) float value_at(const uint8_t *values, int64_t i,
                                                            int type) {
    float value;
    if (type == DPQ_FLOAT32) {
        memcpy(&value, values + 4 * i, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, values + 2 * i, 2);
    if (type == DPQ_FLOAT16) return dpq_half_to_float(half);
    uint32_t word = (uint32_t)half << 16;
    memcpy(&value, &word, 4);
    return value;
}

static inline __attribute__((always_inline)) void partial_of(const dpq_partial_job *job, int type,
                                                             int width) {
    const dpq_table *table = job->table;
    int64_t size = table->size;
    const uint8_t *values = table->values;
    for (int64_t j = job->from; j < job->to; j++) {
        const float *h = job->h + j * size * width;
        float *out = job->partial + (j - job->from) * job->group_pitch;
        for (int64_t k = 0; k <= table->last[j]; k++, out += job->code_pitch) {
            int64_t at = (table->first[j] + k) * size;
            float total[DPQ_LANES] = {0};
            float v = value_at(values, at, type);
            for (int w = 0; w < width; w++) total[w] = h[w] * v;
            for (int64_t i = 1; i < size; i++) {
                v = value_at(values, at + i, type);
                for (int w = 0; w < width; w++) total[w] = total[w] + h[i * width + w] * v;
            }
            for (int64_t w = 0; w < job->lanes; w++) out[w * job->lane_pitch] = total[w];
        }
    }
}

#define TYPES(width)                                                                    \
    switch (job->table->value_type) {                                                   \
        case DPQ_FLOAT32: partial_of(job, DPQ_FLOAT32, width); break;                   \
        case DPQ_FLOAT16: partial_of(job, DPQ_FLOAT16, width); break;                   \
        default: partial_of(job, DPQ_BFLOAT16, width);                                  \
    }

void DPQ_NAME(dpq_partial)(const dpq_partial_job *job) {
    if (job->width == 1) {
        TYPES(1)
    } else {
        TYPES(DPQ_LANES)
    }
}

/* The codes of groups [from, to) of a row as 16-bit numbers; 0 if one is out of range. */
static inline int codes_of(const dpq_logits_job *job, int64_t row, uint16_t *out) {
    const dpq_table *table = job->table;
    int64_t count = job->to - job->from;
    const uint8_t *at = table->codes + row * table->row_bytes;
    if (table->code_bytes == 1) {
        for (int64_t j = 0; j < count; j++) out[j] = at[job->from + j];
    } else if (table->code_bytes == 2) {
        memcpy(out, at + 2 * job->from, (size_t)(2 * count));
    } else {
        const uint8_t *end = table->codes + table->n * table->row_bytes;
        DPQ_NAME(dpq_unpack16)(at, end, table->bits, table->width, job->from, count, out);
    }
    if (!table->checked) return 1;
    int bad = 0;
    for (int64_t j = 0; j < count; j++) bad |= out[j] > table->last[job->from + j];
    return !bad;
}

#define ROWS 4 /* rows at once: their sums do not wait for each other */

#define SUMS(width)                                                                     \
    typedef float vec##width __attribute__((vector_size(4 * width), aligned(4)));       \
    static inline void sums##width(const float *partial, int64_t pitch, int64_t count,  \
                                   uint16_t codes[ROWS][DPQ_TILE],                      \
                                   float out[ROWS][DPQ_LANES]) {                        \
        vec##width a, b, c, d;                                                          \
        memcpy(&a, out[0], sizeof a), memcpy(&b, out[1], sizeof b);                     \
        memcpy(&c, out[2], sizeof c), memcpy(&d, out[3], sizeof d);                     \
        for (int64_t j = 0; j < count; j++, partial += pitch) {                         \
            a += *(const vec##width *)(partial + codes[0][j] * (int64_t)width);         \
            b += *(const vec##width *)(partial + codes[1][j] * (int64_t)width);         \
            c += *(const vec##width *)(partial + codes[2][j] * (int64_t)width);         \
            d += *(const vec##width *)(partial + codes[3][j] * (int64_t)width);         \
        }                                                                               \
        memcpy(out[0], &a, sizeof a), memcpy(out[1], &b, sizeof b);                     \
        memcpy(out[2], &c, sizeof c), memcpy(out[3], &d, sizeof d);                     \
    }

SUMS(1) SUMS(4) SUMS(8) SUMS(16)

int64_t DPQ_NAME(dpq_logits_rows)(const void *argument, int64_t start, int64_t stop) {
    const dpq_logits_job *job = argument;
    const dpq_table *table = job->table;
    int64_t count = job->to - job->from, pitch = job->out_pitch;
    uint16_t codes[ROWS][DPQ_TILE];
    memset(codes, 0, sizeof codes);
    for (int64_t row = start; row < stop; row += ROWS) {
        int64_t rows = stop - row < ROWS ? stop - row : ROWS;
        float sums[ROWS][DPQ_LANES] = {{0}};
        for (int64_t r = 0; r < rows; r++) {
            if (row + r == table->padding) memset(codes[r], 0, sizeof codes[r]);
            else if (!codes_of(job, row + r, codes[r])) return 1 + row + r;
            if (job->from) {
                for (int64_t b = 0; b < job->lanes; b++) sums[r][b] = job->out[b * pitch + row + r];
            }
        }
        switch (job->width) {
            case 1: sums1(job->partial, job->pitch, count, codes, sums); break;
            case 4: sums4(job->partial, job->pitch, count, codes, sums); break;
            case 8: sums8(job->partial, job->pitch, count, codes, sums); break;
            default: sums16(job->partial, job->pitch, count, codes, sums);
        }
        for (int64_t b = 0; b < job->lanes; b++) {
            for (int64_t r = 0; r < rows; r++) job->out[b * pitch + row + r] = sums[r][b];
        }
    }
    return 0;
}
