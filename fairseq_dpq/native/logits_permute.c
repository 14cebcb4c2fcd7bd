/* Logits for groups of at most 64 codes: a group's sums fit into registers, and a permutation picks
 * those of 16 rows at once. Needs AVX-512; elsewhere this file is empty. */
#include "internal.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

#define BLOCK 64 /* rows at once */

/* Transpose 16 rows of 16 bytes, `from_pitch` bytes apart, into rows of BLOCK bytes. */
static inline void transpose16(const uint8_t *from, int64_t from_pitch, uint8_t *to) {
    __m128i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm_loadu_si128((const void *)(from + i * from_pitch));
    /* Each round interleaves row i with row i + 8: four rounds make a transposition. */
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        for (int i = 0; i < 8; i++) {
            a[2 * i] = _mm_unpacklo_epi8(b[i], b[i + 8]);
            a[2 * i + 1] = _mm_unpackhi_epi8(b[i], b[i + 8]);
        }
    }
    for (int i = 0; i < 16; i++) _mm_storeu_si128((void *)(to + i * BLOCK), a[i]);
}

/* 16 of a group's sums, by code. */
static inline __attribute__((always_inline)) __m512 pick(const float *sums, __m512i code, int large) {
    __m512 low = _mm512_permutex2var_ps(_mm512_loadu_ps(sums), code, _mm512_loadu_ps(sums + 16));
    if (!large) return low;
    __m512 high =
        _mm512_permutex2var_ps(_mm512_loadu_ps(sums + 32), code, _mm512_loadu_ps(sums + 48));
    return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(code, _mm512_set1_epi32(32)), high);
}

/* The sums of BLOCK rows for `lanes` rows of h. `lanes` and `large` are constants. */
static inline __attribute__((always_inline)) void block(const uint8_t *codes, const float *partial,
                                                        int64_t lane_pitch, int64_t count,
                                                        int lanes, int large,
                                                        float sums[4][BLOCK]) {
    __m512 total[4][4];
    int pitch = large ? 64 : 32;
    for (int b = 0; b < lanes; b++) {
        for (int r = 0; r < 4; r++) total[b][r] = _mm512_loadu_ps(sums[b] + 16 * r);
    }
    for (int64_t j = 0; j < count; j++, codes += BLOCK, partial += pitch) {
        __m512i code[4];
        for (int r = 0; r < 4; r++) {
            code[r] = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(codes + 16 * r)));
        }
        for (int b = 0; b < lanes; b++) {
            for (int r = 0; r < 4; r++) {
                __m512 own = pick(partial + b * lane_pitch, code[r], large);
                total[b][r] = _mm512_add_ps(total[b][r], own);
            }
        }
    }
    for (int b = 0; b < lanes; b++) {
        for (int r = 0; r < 4; r++) _mm512_storeu_ps(sums[b] + 16 * r, total[b][r]);
    }
}

#define CASES(large)                                                                        \
    switch (lanes) {                                                                        \
        case 1: block(codes, partial, lane_pitch, count, 1, large, sums); break;            \
        case 2: block(codes, partial, lane_pitch, count, 2, large, sums); break;            \
        case 3: block(codes, partial, lane_pitch, count, 3, large, sums); break;            \
        default: block(codes, partial, lane_pitch, count, 4, large, sums);                  \
    }

static void sum_block(const uint8_t *codes, const float *partial, int64_t lane_pitch, int64_t count,
                      int64_t lanes, int large, float sums[4][BLOCK]) {
    if (large) {
        CASES(1)
    } else {
        CASES(0)
    }
}

int64_t DPQ_NAME(dpq_logits_permute)(const void *argument, int64_t start, int64_t stop) {
    const dpq_logits_job *job = argument;
    const dpq_table *table = job->table;
    int64_t from = job->from, count = job->to - job->from, n = table->n;
    int64_t whole = count & ~(int64_t)15;
    int large = job->pitch == 64;
    const uint8_t *end = table->codes + n * table->row_bytes;
    uint8_t rows[BLOCK][DPQ_TILE];
    uint8_t columns[DPQ_TILE * BLOCK];
    memset(rows, 0, sizeof rows);
    for (int64_t row = start; row < stop; row += BLOCK) {
        int64_t live = stop - row < BLOCK ? stop - row : BLOCK;
        const uint8_t *source = table->codes + row * table->row_bytes + from;
        int64_t pitch = table->row_bytes;
        int copied = !table->code_bytes || live < BLOCK || whole < count;
        for (int64_t r = 0; r < live; r++) {
            const uint8_t *own = table->codes + (row + r) * table->row_bytes;
            const uint8_t *codes = own + from;
            if (copied) {
                codes = rows[r];
                if (table->code_bytes) memcpy(rows[r], own + from, (size_t)count);
                else DPQ_NAME(dpq_unpack8)(own, end, table->bits, table->width, from, count, rows[r]);
            }
            if (table->checked && row + r != table->padding &&
                dpq_exceeds8(table, codes, from, count)) {
                return 1 + row + r;
            }
        }
        if (copied) source = rows[0], pitch = DPQ_TILE;
        for (int64_t j = 0; j < count; j += 16) {
            for (int64_t r = 0; r < BLOCK; r += 16) {
                transpose16(source + r * pitch + j, pitch, columns + j * BLOCK + r);
            }
        }
        int64_t lane_pitch = job->pitch * count;
        for (int64_t b = 0; b < job->lanes; b += 4) {
            int64_t lanes = job->lanes - b < 4 ? job->lanes - b : 4;
            float sums[4][BLOCK] = {{0}};
            float *out = job->out + b * job->out_pitch + row;
            size_t bytes = (size_t)live * sizeof(float);
            if (from) {
                for (int64_t i = 0; i < lanes; i++) memcpy(sums[i], out + i * job->out_pitch, bytes);
            }
            sum_block(columns, job->partial + b * lane_pitch, lane_pitch, count, lanes, large, sums);
            for (int64_t i = 0; i < lanes; i++) memcpy(out + i * job->out_pitch, sums[i], bytes);
        }
    }
    return 0;
}
#else
typedef int dpq_no_permute;
#endif
