/* The gradient of a softmax over keys. Vectors run over the keys: K is padded to a multiple of LANES
 * with keys whose offset is so low that their probability is 0. Sums are taken lane by lane, then
 * over the lanes, so that they do not depend on the instruction set. */
#include <stdlib.h>

#include "internal.h"

#define LANES 16

/* e^x of x <= 0, within two units of the last place; 0 below -87. */
static inline __attribute__((always_inline)) float exp_of(float x) {
    const float low = -87.0f, round = 12582912.0f; /* 1.5 * 2^23 */
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

/* The sum of all lanes, halves at a time: sixteen additions in a row would take longer than all the
 * rest. */
static inline __attribute__((always_inline)) float sum_of(const float *lanes) {
    float eight[8], four[4];
    for (int l = 0; l < 8; l++) eight[l] = lanes[l] + lanes[l + 8];
    for (int l = 0; l < 4; l++) four[l] = eight[l] + eight[l + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline __attribute__((always_inline)) float largest_of(const float *lanes) {
    float eight[8], four[4];
    for (int l = 0; l < 8; l++) eight[l] = lanes[l] > lanes[l + 8] ? lanes[l] : lanes[l + 8];
    for (int l = 0; l < 4; l++) four[l] = eight[l] > eight[l + 4] ? eight[l] : eight[l + 4];
    float a = four[0] > four[2] ? four[0] : four[2], b = four[1] > four[3] ? four[1] : four[3];
    return a > b ? a : b;
}

/* out[k] = start[k] + sum over i of x[i] * matrix[i][k]; start may be null. */
static inline __attribute__((always_inline)) void combine(const float *restrict x,
                                                          const float *restrict matrix,
                                                          const float *restrict start, int64_t size,
                                                          int64_t width, float *restrict out) {
    for (int64_t k = 0; k < width; k += LANES) {
        float sum[LANES];
        for (int l = 0; l < LANES; l++) sum[l] = start ? start[k + l] : 0;
        for (int64_t i = 0; i < size; i++) {
            const float *row = matrix + i * width + k;
            for (int l = 0; l < LANES; l++) sum[l] += x[i] * row[l];
        }
        for (int l = 0; l < LANES; l++) out[k + l] = sum[l];
    }
}

static inline __attribute__((always_inline)) void one_row(const dpq_softmax_job *job, int64_t g,
                                                          const float *x, const float *grad,
                                                          float *grad_x, float *restrict p,
                                                          float *restrict w, int64_t features,
                                                          int64_t size, int64_t width) {
    const float *direction = job->direction + g * features * width;
    combine(x, direction, job->offset + g * width, features, width, p);
    float top[LANES], sum[LANES], dot[LANES];
    for (int l = 0; l < LANES; l++) top[l] = p[l];
    for (int64_t k = LANES; k < width; k += LANES) {
        for (int l = 0; l < LANES; l++) top[l] = p[k + l] > top[l] ? p[k + l] : top[l];
    }
    float largest = largest_of(top);
    combine(grad, job->values + g * size * width, NULL, size, width, w);
    for (int l = 0; l < LANES; l++) sum[l] = dot[l] = 0;
    for (int64_t k = 0; k < width; k += LANES) {
        for (int l = 0; l < LANES; l++) {
            float e = exp_of(p[k + l] - largest);
            p[k + l] = e;
            sum[l] += e;
            dot[l] += e * w[k + l];
        }
    }
    float whole = sum_of(sum), mean = sum_of(dot) / whole, share = 1 / whole;
    float *grad_offset = job->grad_offset + g * width;
    for (int64_t k = 0; k < width; k += LANES) {
        for (int l = 0; l < LANES; l++) {
            p[k + l] = p[k + l] * share * (w[k + l] - mean);
            grad_offset[k + l] += p[k + l];
        }
    }
    for (int64_t i = 0; i < features; i++) {
        const float *row = direction + i * width;
        float *grad_row = job->grad_direction + (g * features + i) * width;
        float total[LANES];
        for (int l = 0; l < LANES; l++) total[l] = 0;
        for (int64_t k = 0; k < width; k += LANES) {
            for (int l = 0; l < LANES; l++) {
                total[l] += p[k + l] * row[k + l];
                grad_row[k + l] += p[k + l] * x[i];
            }
        }
        grad_x[i] = sum_of(total);
    }
}

/* Groups [start, end), or all of them where they share their keys. */
int64_t DPQ_NAME(dpq_softmax_groups)(const void *all, int64_t start, int64_t end) {
    const dpq_softmax_job *job = all;
    const dpq_softmax *in = job->in;
    int64_t D = in->D, m = in->features_size, size = in->size, width = job->width;
    int64_t first = in->G == 1 ? 0 : start, last = in->G == 1 ? D : end;
    float *p = malloc((size_t)(2 * width) * sizeof *p);
    if (!p) return DPQ_NO_MEMORY;
    int64_t result = 0;
    for (int64_t row = 0; row < in->rows && !result; row++) {
        for (int64_t j = first; j < last; j++) {
            int64_t g = in->G == 1 ? 0 : j;
            const float *x = in->features + row * in->stride + j * m;
            const float *grad = in->grad + (row * D + j) * size;
            float *grad_x = in->grad_features + (row * D + j) * m;
            int64_t code = in->codes[row * D + j];
            if (code < 0 || code >= in->K) {
                result = 1 + row;
                break;
            }
            float *value = in->grad_values + (g * in->K + code) * size;
            for (int64_t i = 0; i < size; i++) value[i] += grad[i];
            if (m == 4 && size == 4 && width == 32) one_row(job, g, x, grad, grad_x, p, p + width, 4, 4, 32);
            else if (m == 2 && size == 2) one_row(job, g, x, grad, grad_x, p, p + width, 2, 2, width);
            else if (m == 4 && size == 4) one_row(job, g, x, grad, grad_x, p, p + width, 4, 4, width);
            else if (m == 8 && size == 8) one_row(job, g, x, grad, grad_x, p, p + width, 8, 8, width);
            else one_row(job, g, x, grad, grad_x, p, p + width, m, size, width);
        }
    }
    free(p);
    return result;
}
