/* Codes of queries, in the order of operations that defines them: float32 sums, one dimension after
 * the other, without fused multiply-add. Vectors run over tokens, never over a sum. */
#include <math.h>
#include <stdlib.h>

#include "internal.h"

#define TOKENS 64 /* handled at once; their queries lie dimension by dimension */

static inline __attribute__((always_inline)) float term(float q, float k, int euclidean) {
    float difference = q - k;
    return euclidean ? -(difference * difference) : q * k;
}

typedef struct {
    float best[TOKENS];
    float seen[TOKENS]; /* the sum of all responses: NaN if one of them is */
    int32_t code[TOKENS];
} ranking;

static inline __attribute__((always_inline)) void take(ranking *top, int t, float v, int32_t k) {
    top->seen[t] += v;
    int better = v > top->best[t];
    top->best[t] = better ? v : top->best[t];
    top->code[t] = better ? k : top->code[t];
}

/* Rank all keys. `key_dim`, `euclidean` and `normalized` are constants where this is called. */
static inline __attribute__((always_inline)) void scan(const float *restrict q,
                                                       const float *restrict keys, int64_t K,
                                                       int key_dim, int euclidean, int normalized,
                                                       const float *mean, const float *scale,
                                                       ranking *restrict top) {
    for (int64_t k = 0; k < K; k++) {
        const float *key = keys + k * key_dim;
        float m = normalized ? mean[k] : 0, s = normalized ? scale[k] : 1;
        for (int t = 0; t < TOKENS; t++) {
            float v = term(q[t], key[0], euclidean);
#pragma GCC unroll 16
            for (int i = 1; i < key_dim; i++) v = v + term(q[i * TOKENS + t], key[i], euclidean);
            take(top, t, normalized ? (v - m) * s : v, (int32_t)k);
        }
    }
}

/* The same for any number of dimensions, eight at a time. */
static inline __attribute__((always_inline)) void scan_long(const float *restrict q,
                                                            const float *restrict keys, int64_t K,
                                                            int64_t key_dim, int euclidean,
                                                            const float *mean, const float *scale,
                                                            ranking *restrict top) {
    for (int64_t k = 0; k < K; k++) {
        const float *key = keys + k * key_dim;
        float total[TOKENS];
        for (int t = 0; t < TOKENS; t++) total[t] = term(q[t], key[0], euclidean);
        int64_t i = 1;
        for (; i + 8 <= key_dim; i += 8) {
            for (int t = 0; t < TOKENS; t++) {
                float v = total[t];
#pragma GCC unroll 8
                for (int m = 0; m < 8; m++) {
                    v = v + term(q[(i + m) * TOKENS + t], key[i + m], euclidean);
                }
                total[t] = v;
            }
        }
        for (; i < key_dim; i++) {
            for (int t = 0; t < TOKENS; t++) {
                total[t] = total[t] + term(q[i * TOKENS + t], key[i], euclidean);
            }
        }
        float m = mean ? mean[k] : 0, s = mean ? scale[k] : 1;
        for (int t = 0; t < TOKENS; t++) {
            take(top, t, mean ? (total[t] - m) * s : total[t], (int32_t)k);
        }
    }
}

#define CASE(size)                                                                     \
    case size:                                                                         \
        if (mean) scan(q, keys, K, size, euclidean, 1, mean, scale, top);              \
        else scan(q, keys, K, size, euclidean, 0, mean, scale, top);                   \
        return;

static inline __attribute__((always_inline)) void rank(const float *q, const float *keys, int64_t K,
                                                       int64_t key_dim, int euclidean,
                                                       const float *mean, const float *scale,
                                                       ranking *top) {
    switch (key_dim) {
        CASE(1) CASE(2) CASE(4) CASE(8) CASE(16)
        default:
            scan_long(q, keys, K, key_dim, euclidean, mean, scale, top);
    }
}

static void rank_products(const float *q, const float *keys, int64_t K, int64_t key_dim,
                          const float *mean, const float *scale, ranking *top) {
    rank(q, keys, K, key_dim, 0, mean, scale, top);
}

static void rank_distances(const float *q, const float *keys, int64_t K, int64_t key_dim,
                           const float *mean, const float *scale, ranking *top) {
    rank(q, keys, K, key_dim, 1, mean, scale, top);
}

/* The code of one token some of whose responses are NaN: the first of them. */
static int32_t code_with_nan(const float *q, const float *keys, int64_t K, int64_t key_dim,
                             int euclidean, const float *mean, const float *scale) {
    int32_t code = 0;
    float best = -INFINITY;
    for (int64_t k = 0; k < K; k++) {
        const float *key = keys + k * key_dim;
        float v = term(q[0], key[0], euclidean);
        for (int64_t i = 1; i < key_dim; i++) v = v + term(q[i * TOKENS], key[i], euclidean);
        if (mean) v = (v - mean[k]) * scale[k];
        if (v != v) return (int32_t)k;
        if (v > best) best = v, code = (int32_t)k;
    }
    return code;
}

static void store(const dpq_query *job, int64_t token, int64_t group, int64_t count,
                  const int32_t *code) {
    int64_t at = token * job->D + group;
    if (job->out_bytes == 1) {
        uint8_t *out = (uint8_t *)job->out + at;
        for (int64_t t = 0; t < count; t++) out[t * job->D] = (uint8_t)code[t];
    } else if (job->out_bytes == 2) {
        int16_t *out = (int16_t *)job->out + at;
        for (int64_t t = 0; t < count; t++) out[t * job->D] = (int16_t)code[t];
    } else {
        int64_t *out = (int64_t *)job->out + at;
        for (int64_t t = 0; t < count; t++) out[t * job->D] = code[t];
    }
}

int64_t DPQ_NAME(dpq_codes_rows)(const void *argument, int64_t start, int64_t stop) {
    const dpq_query *job = argument;
    int64_t key_dim = job->key_dim, K = job->K;
    int euclidean = job->distance == DPQ_EUCLIDEAN;
    float *q = malloc((size_t)key_dim * TOKENS * sizeof(float));
    if (!q) return DPQ_NO_MEMORY;
    for (int64_t token = start; token < stop; token += TOKENS) {
        int64_t count = stop - token < TOKENS ? stop - token : TOKENS;
        for (int64_t j = 0; j < job->D; j++) {
            const float *rows = job->query + token * job->stride + j * key_dim;
            if (count < TOKENS) memset(q, 0, (size_t)key_dim * TOKENS * sizeof(float));
            for (int64_t t = 0; t < count; t++) {
                for (int64_t i = 0; i < key_dim; i++) q[i * TOKENS + t] = rows[t * job->stride + i];
            }
            const float *keys = job->keys + (job->G > 1 ? j * K * key_dim : 0);
            const float *mean = NULL, *scale = NULL;
            if (job->mean) {
                int64_t at = job->stat_groups > 1 ? j * K : 0;
                mean = job->mean + at;
                scale = job->scale + at;
            }
            ranking top;
            for (int t = 0; t < TOKENS; t++) {
                top.best[t] = -INFINITY;
                top.seen[t] = 0;
                top.code[t] = 0;
            }
            if (euclidean) rank_distances(q, keys, K, key_dim, mean, scale, &top);
            else rank_products(q, keys, K, key_dim, mean, scale, &top);
            for (int64_t t = 0; t < count; t++) {
                if (top.seen[t] != top.seen[t]) {
                    top.code[t] = code_with_nan(q + t, keys, K, key_dim, euclidean, mean, scale);
                }
            }
            store(job, token, j, count, top.code);
        }
    }
    free(q);
    return 0;
}
