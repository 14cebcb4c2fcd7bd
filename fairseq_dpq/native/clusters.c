/* What a round of k-means needs: the nearest centroid of each point, and the sums of the points of
 * each centroid. The nearest one has the largest <point, centroid> - |centroid|^2 / 2, summed in
 * float32, one dimension after the other, so that every instruction set finds the same. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "internal.h"

#define TOKENS 64          /* points at once; they lie dimension by dimension */
#define CACHED (1 << 15)   /* sums that one pass over the rows adds to: 256 KB */

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDTH 16
#define BLOCK 4 /* vectors of points whose best centroids stay in registers */
typedef __m512 vec;
typedef __m512i ivec;
#define LOAD(from) _mm512_loadu_ps(from)
#define STORE(to, v) _mm512_storeu_si512(to, v)
#define ALL(x) _mm512_set1_ps(x)
#define ALL_INT(x) _mm512_set1_epi32(x)
#define ADD(a, b) _mm512_add_epi32(a, b)
#define BETTER(v, best, k, code) \
    (code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ), k), \
     best = _mm512_max_ps(v, best))
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 8
#define BLOCK 2
typedef __m256 vec;
typedef __m256i ivec;
#define LOAD(from) _mm256_loadu_ps(from)
#define STORE(to, v) _mm256_storeu_si256((ivec *)(to), v)
#define ALL(x) _mm256_set1_ps(x)
#define ALL_INT(x) _mm256_set1_epi32(x)
#define ADD(a, b) _mm256_add_epi32(a, b)
#define BETTER(v, best, k, code) \
    (code = _mm256_blendv_epi8(code, k, _mm256_castps_si256(_mm256_cmp_ps(v, best, _CMP_GT_OQ))), \
     best = _mm256_max_ps(v, best))
#else
#define WIDTH 4
#define BLOCK 2
typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
static inline vec load_vec(const float *from) {
    vec out;
    memcpy(&out, from, sizeof out);
    return out;
}
#define LOAD(from) load_vec(from)
#define STORE(to, v) memcpy(to, &(v), sizeof(v))
#define ALL(x) ((vec){0} + (x))
#define ALL_INT(x) ((ivec){0} + (x))
#define ADD(a, b) ((a) + (b))
static inline void better(vec v, vec *best, ivec k, ivec *code) {
    ivec mask = v > *best;
    *code = (mask & k) | (~mask & *code);
    *best = (vec)((mask & (ivec)v) | (~mask & (ivec)*best));
}
#define BETTER(v, best, k, code) better(v, &best, k, &code)
#endif

/* The nearest of K centroids for points q (size, TOKENS). `size` is a constant where it is small. */
static inline __attribute__((always_inline)) void scan(const float *restrict q,
                                                       const float *restrict centroids,
                                                       const float *restrict minus_half, int64_t K,
                                                       int64_t size, int32_t *restrict codes) {
    for (int at = 0; at < TOKENS; at += BLOCK * WIDTH) {
        vec best[BLOCK];
        ivec code[BLOCK], number = ALL_INT(0), one = ALL_INT(1);
        for (int u = 0; u < BLOCK; u++) best[u] = ALL(-INFINITY), code[u] = ALL_INT(0);
        const float *own = q + at, *c = centroids;
        for (int64_t k = 0; k < K; k++, c += size) {
            vec v[BLOCK], part = ALL(c[0]), start = ALL(minus_half[k]);
#pragma GCC unroll 4
            for (int u = 0; u < BLOCK; u++) v[u] = LOAD(own + u * WIDTH) * part + start;
#pragma GCC unroll 8
            for (int64_t i = 1; i < size; i++) {
                part = ALL(c[i]);
#pragma GCC unroll 4
                for (int u = 0; u < BLOCK; u++) {
                    v[u] = v[u] + LOAD(own + i * TOKENS + u * WIDTH) * part;
                }
            }
#pragma GCC unroll 4
            for (int u = 0; u < BLOCK; u++) BETTER(v[u], best[u], number, code[u]);
            number = ADD(number, one);
        }
        for (int u = 0; u < BLOCK; u++) STORE(codes + at + u * WIDTH, code[u]);
    }
}

static void nearest_of(const float *q, const float *centroids, const float *minus_half, int64_t K,
                       int64_t size, int32_t *codes) {
    switch (size) {
        case 1: scan(q, centroids, minus_half, K, 1, codes); return;
        case 2: scan(q, centroids, minus_half, K, 2, codes); return;
        case 3: scan(q, centroids, minus_half, K, 3, codes); return;
        case 4: scan(q, centroids, minus_half, K, 4, codes); return;
        case 8: scan(q, centroids, minus_half, K, 8, codes); return;
        default: scan(q, centroids, minus_half, K, size, codes);
    }
}

static void store(const dpq_clusters *job, int64_t row, int64_t group, int64_t count,
                  const int32_t *codes) {
    int64_t bytes = job->code_bytes;
    uint8_t *out = (uint8_t *)job->codes + (row * job->D + group) * bytes;
    for (int64_t t = 0; t < count; t++, out += job->D * bytes) {
        int64_t code = codes[t];
        uint16_t half = (uint16_t)code;
        if (bytes == 1) *out = (uint8_t)code;
        else if (bytes == 2) memcpy(out, &half, 2);
        else memcpy(out, &code, 8);
    }
}

/* Chunks [start, end) of DPQ_CHUNK points. */
int64_t DPQ_NAME(dpq_nearest_chunks)(const void *argument, int64_t start, int64_t end) {
    const dpq_nearest_job *all = argument;
    const dpq_clusters *job = all->clusters;
    int64_t size = job->size, K = job->K, last = end * DPQ_CHUNK < job->n ? end * DPQ_CHUNK : job->n;
    float *q = calloc((size_t)size * TOKENS, sizeof(float));
    if (!q) return DPQ_NO_MEMORY;
    for (int64_t row = start * DPQ_CHUNK; row < last; row += TOKENS) {
        int64_t count = last - row < TOKENS ? last - row : TOKENS;
        double *error = all->error ? all->error + row / DPQ_CHUNK * job->D : NULL;
        for (int64_t j = 0; j < job->D; j++) {
            const float *rows = job->points + row * job->stride + j * job->group_stride;
            int64_t group = job->G > 1 ? j : 0;
            const float *centroids = job->centroids + group * K * size;
            for (int64_t t = 0; t < count; t++) {
                for (int64_t i = 0; i < size; i++) q[i * TOKENS + t] = rows[t * job->stride + i];
            }
            int32_t codes[TOKENS];
            nearest_of(q, centroids, all->minus_half + group * K, K, size, codes);
            store(job, row, j, count, codes);
            for (int64_t t = 0; error && t < count; t++) {
                const float *own = centroids + codes[t] * size;
                float total = 0;
                for (int64_t i = 0; i < size; i++) {
                    float difference = q[i * TOKENS + t] - own[i];
                    total = total + difference * difference;
                }
                error[j] += total;
            }
        }
    }
    free(q);
    return 0;
}

/* Add one weighted point. `size` is a constant where it is small. */
static inline __attribute__((always_inline)) void add(double *restrict sums,
                                                      const float *restrict point, double weight,
                                                      int64_t size) {
    for (int64_t i = 0; i < size; i++) sums[i] += weight * (double)point[i];
}

static inline int64_t code_at(const dpq_clusters *job, int64_t at) {
    int64_t code = 0;
    if (job->code_bytes == 1) return ((const uint8_t *)job->codes)[at];
    if (job->code_bytes == 2) {
        uint16_t half;
        memcpy(&half, (const uint8_t *)job->codes + 2 * at, 2);
        return half;
    }
    memcpy(&code, (const uint8_t *)job->codes + 8 * at, 8);
    return code;
}

/* Groups [start, end), some at a time so that their sums stay in cache. */
int64_t DPQ_NAME(dpq_sums_groups)(const void *argument, int64_t start, int64_t end) {
    const dpq_clusters *job = argument;
    int64_t size = job->size, K = job->K, step = CACHED / (K * size) + 1;
    for (int64_t from = start; from < end; from += step) {
        int64_t to = from + step < end ? from + step : end;
        for (int64_t row = 0; row < job->n; row++) {
            double weight = job->weights ? (double)job->weights[row] : 1;
            const float *point = job->points + row * job->stride + from * job->group_stride;
            for (int64_t j = from; j < to; j++, point += job->group_stride) {
                int64_t code = code_at(job, row * job->D + j);
                if (code < 0 || code >= K) return 1 + row;
                double *sums = job->sums + (j * K + code) * size;
                job->mass[j * K + code] += weight;
                switch (size) {
                    case 1: add(sums, point, weight, 1); break;
                    case 2: add(sums, point, weight, 2); break;
                    case 4: add(sums, point, weight, 4); break;
                    case 8: add(sums, point, weight, 8); break;
                    default: add(sums, point, weight, size);
                }
            }
        }
    }
    return 0;
}

#define SUMS 8 /* running sums side by side, the same for all instruction sets */

/* The sum of TOKENS numbers in a fixed order. */
static double block_sum(const float *numbers) {
    double lanes[SUMS] = {0}, total = 0;
    for (int t = 0; t < TOKENS; t += SUMS) {
        for (int l = 0; l < SUMS; l++) lanes[l] += (double)numbers[t + l];
    }
    for (int l = 0; l < SUMS; l++) total += lanes[l];
    return total;
}

/* The point at share `draw` of the sum of all distances; any point where that is no number. */
static int64_t drawn(const float *distance, const double *sums, int64_t n, double draw) {
    int64_t blocks = (n + TOKENS - 1) / TOKENS, block = 0;
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) total += sums[b];
    int64_t at = draw >= 0 && draw < 1 ? (int64_t)(draw * (double)n) : 0;
    if (!(total > 0 && total <= DBL_MAX)) return at < n ? at : n - 1;
    double rest = draw * total;
    while (block < blocks - 1 && rest >= sums[block]) rest -= sums[block++];
    for (at = block * TOKENS; at < n - 1 && at < (block + 1) * TOKENS - 1; at++) {
        rest -= (double)distance[at];
        if (rest < 0) break;
    }
    return at;
}

/* Set the squared distances of points q (blocks, size, TOKENS) from one more centroid. */
static inline __attribute__((always_inline)) void closer(const float *restrict q,
                                                         const float *restrict centroid,
                                                         int64_t n, int64_t size, int first,
                                                         float *restrict distance, double *sums) {
    for (int64_t at = 0; at < n; at += TOKENS, q += size * TOKENS) {
        int64_t count = n - at < TOKENS ? n - at : TOKENS;
        float total[TOKENS] = {0};
        for (int64_t i = 0; i < size; i++) {
            for (int t = 0; t < TOKENS; t++) {
                float difference = q[i * TOKENS + t] - centroid[i];
                total[t] = total[t] + difference * difference;
            }
        }
        for (int t = 0; t < TOKENS; t++) {
            float known = first ? INFINITY : distance[at + t];
            float next = total[t] < known ? total[t] : known;
            distance[at + t] = first && !(next < INFINITY) ? 0 : next; /* NaN: never drawn */
        }
        for (int64_t t = count; t < TOKENS; t++) distance[at + t] = 0;
        sums[at / TOKENS] = block_sum(distance + at);
    }
}

static void first_of(const dpq_clusters *job, int64_t j, float *q, float *distance, double *sums) {
    int64_t n = job->n, size = job->size;
    const float *rows = job->points + j * job->group_stride;
    float *out = job->first + j * job->K * size;
    for (int64_t row = 0; row < n; row++) {
        float *own = q + row / TOKENS * size * TOKENS + row % TOKENS;
        for (int64_t i = 0; i < size; i++) own[i * TOKENS] = rows[row * job->stride + i];
    }
    for (int64_t b = 0; b * TOKENS < n; b++) sums[b] = 0; /* the first is any point */
    for (int64_t k = 0; k < job->K; k++, out += size) {
        int64_t row = drawn(distance, sums, n, job->draws[j * job->K + k]);
        memcpy(out, rows + row * job->stride, (size_t)size * sizeof(float));
        if (size == 2) closer(q, out, n, 2, k == 0, distance, sums);
        else if (size == 4) closer(q, out, n, 4, k == 0, distance, sums);
        else closer(q, out, n, size, k == 0, distance, sums);
    }
}

/* Groups [start, end). */
int64_t DPQ_NAME(dpq_first_groups)(const void *argument, int64_t start, int64_t end) {
    const dpq_clusters *job = argument;
    size_t blocks = (size_t)((job->n + TOKENS - 1) / TOKENS), size = (size_t)job->size;
    float *q = calloc(blocks * size * TOKENS, sizeof(float));
    float *distance = malloc(blocks * TOKENS * sizeof(float));
    double *sums = malloc(blocks * sizeof(double));
    int64_t result = q && distance && sums ? 0 : DPQ_NO_MEMORY;
    for (int64_t j = start; j < end && !result; j++) first_of(job, j, q, distance, sums);
    free(q), free(distance), free(sums);
    return result;
}
