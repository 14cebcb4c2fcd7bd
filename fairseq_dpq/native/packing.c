/* Codes to bits and back. Codes of a row follow each other without gaps, lowest bit first. */
#include "internal.h"

#if defined(__BMI2__) && defined(__x86_64__)
#include <immintrin.h>
#define DPQ_HAS_PDEP 1
#endif

/* The 64 bits from byte `at` on, zeros beyond `end`. */
static inline uint64_t word_at(const uint8_t *at, const uint8_t *end) {
    uint64_t word = 0;
    if (end - at >= 8) {
        memcpy(&word, at, 8);
    } else if (end > at) {
        memcpy(&word, at, (size_t)(end - at));
    }
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Eight codes of `width` <= 8 bits, one in each byte of the result. */
static inline uint64_t spread8(uint64_t word, int width) {
#ifdef DPQ_HAS_PDEP
    return _pdep_u64(word, 0x0101010101010101u * ((1u << width) - 1));
#else
    uint64_t out = 0, mask = (1u << width) - 1;
    for (int i = 0; i < 8; i++) out |= ((word >> (i * width)) & mask) << (8 * i);
    return out;
#endif
}

void DPQ_NAME(dpq_unpack8)(const uint8_t *row, const uint8_t *end, const uint8_t *bits, int32_t width,
                           int64_t from, int64_t count, uint8_t *out) {
    int64_t bit = dpq_bit_of(bits, width, from);
    if (width && bit % 8 == 0) {
        const uint8_t *at = row + bit / 8;
        for (int64_t j = 0; j < count; j += 8, at += width) {
            uint64_t codes = spread8(word_at(at, end), width);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            codes = __builtin_bswap64(codes);
#endif
            memcpy(out + j, &codes, 8);
        }
        return;
    }
    for (int64_t j = 0; j < count; j++) {
        int own = width ? width : bits[from + j];
        out[j] = (uint8_t)((word_at(row + bit / 8, end) >> (bit % 8)) & ((1u << own) - 1));
        bit += own;
    }
}

void DPQ_NAME(dpq_unpack16)(const uint8_t *row, const uint8_t *end, const uint8_t *bits,
                            int32_t width, int64_t from, int64_t count, uint16_t *out) {
    int64_t bit = dpq_bit_of(bits, width, from);
    for (int64_t j = 0; j < count; j++) {
        int own = width ? width : bits[from + j];
        out[j] = (uint16_t)((word_at(row + bit / 8, end) >> (bit % 8)) & ((1u << own) - 1));
        bit += own;
    }
}

/* The tiles of a row are multiples of 8 groups, so that every tile but the last ends on a byte when
 * all widths are equal. */
int64_t DPQ_NAME(dpq_unpack_rows)(const void *argument, int64_t start, int64_t stop) {
    const dpq_packing_job *job = argument;
    const uint8_t *packed = job->from;
    const uint8_t *end = packed + job->n * job->row_bytes;
    int narrow = 1;
    for (int64_t j = 0; j < job->D; j++) narrow &= job->bits[j] <= 8;
    for (int64_t r = start; r < stop; r++) {
        const uint8_t *row = packed + r * job->row_bytes;
        uint8_t *out = (uint8_t *)job->to + r * job->D * job->code_bytes;
        for (int64_t from = 0; from < job->D; from += DPQ_TILE) {
            int64_t count = job->D - from < DPQ_TILE ? job->D - from : DPQ_TILE;
            uint8_t bytes[DPQ_TILE];
            uint16_t words[DPQ_TILE];
            if (narrow) {
                DPQ_NAME(dpq_unpack8)(row, end, job->bits, job->width, from, count, bytes);
            } else {
                DPQ_NAME(dpq_unpack16)(row, end, job->bits, job->width, from, count, words);
            }
            if (job->code_bytes == 1 && narrow) {
                memcpy(out + from, bytes, (size_t)count);
                continue;
            }
            for (int64_t j = 0; j < count; j++) {
                uint16_t code = narrow ? bytes[j] : words[j];
                if (job->code_bytes == 1) {
                    out[from + j] = (uint8_t)code;
                } else if (job->code_bytes == 2) {
                    memcpy(out + 2 * (from + j), &code, 2);
                } else {
                    int64_t wide = code;
                    memcpy(out + 8 * (from + j), &wide, 8);
                }
            }
        }
    }
    return 0;
}

static inline uint64_t code_at(const uint8_t *codes, int64_t j, int32_t bytes) {
    if (bytes == 1) return codes[j];
    if (bytes == 2) {
        uint16_t code;
        memcpy(&code, codes + 2 * j, 2);
        return code;
    }
    uint64_t code;
    memcpy(&code, codes + 8 * j, 8);
    return code;
}

int64_t DPQ_NAME(dpq_pack_rows)(const void *argument, int64_t start, int64_t stop) {
    const dpq_packing_job *job = argument;
    for (int64_t r = start; r < stop; r++) {
        const uint8_t *codes = (const uint8_t *)job->from + r * job->D * job->code_bytes;
        uint8_t *out = (uint8_t *)job->to + r * job->row_bytes;
        uint64_t word = 0;
        int held = 0;
        int64_t at = 0;
        for (int64_t j = 0; j < job->D; j++) {
            int own = job->bits[j];
            word |= (code_at(codes, j, job->code_bytes) & ((1u << own) - 1)) << held;
            for (held += own; held >= 8; held -= 8, word >>= 8) out[at++] = (uint8_t)word;
        }
        if (held) out[at++] = (uint8_t)word;
        memset(out + at, 0, (size_t)(job->row_bytes - at));
    }
    return 0;
}
