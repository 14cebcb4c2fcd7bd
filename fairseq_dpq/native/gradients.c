/* The gradient of a softmax over keys. Vectors run over rows, LANES at a time, so that nothing but
 * the sums over all rows has to be added across the lanes, once at the end. LANES is the same for
 * all instruction sets, and so are the sums. */
#include <float.h>
#include <stdlib.h>

#include "internal.h"

#define LANES 16

/* Left to itself, a compiler may run its vectors over the few dimensions of a group instead. */
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

/* e^x of x <= 0, within two units of the last place; 0 below -50, which is nothing beside the 1 of the
 * largest. Smaller ones would give products of less than 1e-38, which are slow. */
static inline __attribute__((always_inline)) float exp_of(float x) {
    const float low = -50.0f, round = 12582912.0f; /* 1.5 * 2^23 */
    float in = x > low ? x : low;
    float shifted = in * 1.44269504f + round;
    float n = shifted - round;
    float r = in - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    uint32_t bits; /* unsigned: a NaN may become any power, but not undefined behaviour */
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000u + 127u) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x > low ? y * power : 0;
}

static float sum_of(lanes all) {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += all[l];
    return sum;
}

/* LANES rows of one group. x (m) and grad (size) are theirs; sums (K, m + 1) collects the gradients
 * of directions and offset where `summed`; p and w have K. A row of zeros adds 0. */
static inline __attribute__((always_inline)) void
rows_of(const float *restrict direction, const float *restrict offset, const float *restrict values,
        const lanes *restrict x, const lanes *restrict grad, lanes *restrict grad_x,
        lanes *restrict sums, lanes *restrict p, lanes *restrict w, int64_t K, int64_t m,
        int64_t size, int summed) {
    const lanes zero = {0};
    lanes sum = zero, dot = zero, top = zero - FLT_MAX;
    for (int64_t k = 0; k < K; k++) {
        lanes a = zero + offset[k], b = zero;
        for (int64_t i = 0; i < m; i++) a += x[i] * direction[k * m + i];
        for (int64_t i = 0; i < size; i++) b += grad[i] * values[k * size + i];
        for (int l = 0; l < LANES; l++) top[l] = a[l] > top[l] ? a[l] : top[l];
        p[k] = a;
        w[k] = b;
    }
    for (int64_t k = 0; k < K; k++) {
        for (int l = 0; l < LANES; l++) p[k][l] = exp_of(p[k][l] - top[l]);
        sum += p[k];
        dot += p[k] * w[k];
    }
    sum = 1 / sum;
    dot *= sum;
    for (int64_t i = 0; i < m; i++) grad_x[i] = zero;
    for (int64_t k = 0; k < K; k++) {
        lanes d = p[k] * sum * (w[k] - dot);
        for (int64_t i = 0; i < m; i++) grad_x[i] += d * direction[k * m + i];
        if (!summed) continue;
        lanes *own = sums + k * (m + 1);
        for (int64_t i = 0; i < m; i++) own[i] += d * x[i];
        own[m] += d;
    }
}

/* All rows of one group. `memory` begins with the sums, which the caller has set. */
static int64_t one_group(const dpq_softmax *in, int64_t j, lanes *memory) {
    int64_t K = in->K, m = in->features_size, size = in->size, g = in->G == 1 ? 0 : j;
    int summed = in->grad_direction != NULL;
    const float *direction = in->direction + g * K * m, *offset = in->offset + g * K;
    const float *values = in->values + g * K * size;
    lanes *sums = memory, *p = sums + K * (m + 1), *w = p + K;
    lanes *x = w + K, *grad_x = x + m, *grad = grad_x + m;
    for (int64_t row = 0; row < in->rows; row += LANES) {
        int64_t count = in->rows - row < LANES ? in->rows - row : LANES;
        if (count < LANES) memset(x, 0, (size_t)(2 * m + size) * sizeof *x);
        for (int64_t l = 0; l < count; l++) {
            const float *own = in->features + (row + l) * in->stride + j * m;
            const float *got = in->grad + ((row + l) * in->D + j) * size;
            int64_t code = in->codes[(row + l) * in->D + j];
            if (code < 0 || code >= K) return 1 + row + l;
            float *value = in->grad_values + (g * K + code) * size;
            for (int64_t i = 0; i < m; i++) x[i][l] = own[i];
            for (int64_t i = 0; i < size; i++) {
                grad[i][l] = got[i];
                value[i] += got[i];
            }
        }
#define ROWS(m, size)                                                                         \
    (summed ? rows_of(direction, offset, values, x, grad, grad_x, sums, p, w, K, m, size, 1)  \
            : rows_of(direction, offset, values, x, grad, grad_x, sums, p, w, K, m, size, 0))
        if (m == 4 && size == 4) ROWS(4, 4);
        else if (m == 2 && size == 2) ROWS(2, 2);
        else if (m == 8 && size == 8) ROWS(8, 8);
        else ROWS(m, size);
        for (int64_t l = 0; l < count; l++) {
            float *out = in->grad_features + ((row + l) * in->D + j) * m;
            for (int64_t i = 0; i < m; i++) out[i] = grad_x[i][l];
        }
    }
    return 0;
}

/* Groups [start, end), or all of them where they share their keys. */
int64_t DPQ_NAME(dpq_softmax_groups)(const void *all, int64_t start, int64_t end) {
    const dpq_softmax *in = all;
    int64_t K = in->K, m = in->features_size, shared = in->G == 1;
    int64_t count = K * (m + 1), rest = 2 * K + 2 * m + in->size;
    lanes *memory = aligned_alloc(sizeof *memory, (size_t)(count + rest) * sizeof *memory);
    if (!memory) return DPQ_NO_MEMORY;
    int64_t result = 0;
    for (int64_t g = start; g < end && !result; g++) {
        memset(memory, 0, (size_t)count * sizeof *memory);
        for (int64_t j = shared ? 0 : g; j < (shared ? in->D : g + 1) && !result; j++) {
            result = one_group(in, j, memory);
        }
        for (int64_t k = 0; in->grad_direction && k < K; k++) {
            const lanes *sums = memory + k * (m + 1);
            for (int64_t i = 0; i < m; i++) {
                in->grad_direction[(g * K + k) * m + i] = sum_of(sums[i]);
            }
            in->grad_offset[g * K + k] = sum_of(sums[m]);
        }
    }
    free(memory);
    return result;
}
