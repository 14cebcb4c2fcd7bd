/* The exported functions: arguments are checked here, once per call; kernels trust them. */
#include <stdlib.h>
#ifdef DPQ_X86_VARIANTS
#include <cpuid.h>
#endif

#include "internal.h"

#ifndef DPQ_HASH
#define DPQ_HASH ""
#endif

#define PARTIAL_FLOATS (1 << 16) /* of partial sums held at once: 256 KB, so that they stay in cache */
#define GRAIN_BYTES (1 << 19)    /* of output per thread, at least */

static const dpq_kernels *kernels(void) {
    static const dpq_kernels *picked;
    const dpq_kernels *found = __atomic_load_n(&picked, __ATOMIC_ACQUIRE);
    if (found) return found;
    found = &dpq_kernels_baseline;
#ifdef DPQ_X86_VARIANTS
    __builtin_cpu_init();
    const char *wanted = getenv("FAIRSEQ_DPQ_NATIVE_VARIANT");
    int level = !wanted ? 2 : strcmp(wanted, "baseline") == 0 ? 0 : strcmp(wanted, "avx2") == 0 ? 1 : 2;
    unsigned a, b, c = 0, d;
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && f16c;
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (level > 0 && avx2) found = &dpq_kernels_avx2;
    if (level > 1 && avx2 && avx512) found = &dpq_kernels_avx512;
#endif
    __atomic_store_n(&picked, found, __ATOMIC_RELEASE);
    return found;
}

const char *dpq_variant(void) { return kernels()->name; }

const char *dpq_source_hash(void) { return DPQ_HASH; }

int64_t dpq_prepare(dpq_table *table) {
    if (!table || table->n < 0 || table->D < 1 || table->size < 1 || table->value_rows < 1 ||
        !table->first || !table->last || !table->values || (table->n && !table->codes) ||
        table->padding < -1 || table->padding >= table->n || table->value_type < DPQ_FLOAT32 ||
        table->value_type > DPQ_BFLOAT16 || table->code_bytes < 0 || table->code_bytes > 2 ||
        (!table->code_bytes && !table->bits)) {
        return DPQ_BAD_TABLE;
    }
    int64_t total = 0;
    table->step = table->D > 1 ? table->first[1] - table->first[0] : 0;
    table->width = table->code_bytes ? 0 : table->bits[0];
    table->largest = 0;
    table->smallest = 32767;
    table->checked = 0;
    for (int64_t j = 0; j < table->D; j++) {
        int64_t first = table->first[j], last = table->last[j];
        if (first < 0 || last > 32767 || first > table->value_rows - 1 - last) return DPQ_BAD_TABLE;
        if (first != table->first[0] + j * table->step) table->step = -1;
        if (last > table->largest) table->largest = (int32_t)last;
        if (last < table->smallest) table->smallest = (int32_t)last;
        int width = 8 * table->code_bytes;
        if (!width) {
            width = table->bits[j];
            if (width > 15) return DPQ_BAD_TABLE;
            if (width != table->width) table->width = 0;
        }
        total += width;
        if (last + 1 < (int64_t)1 << width) table->checked = 1;
    }
    if (table->step < 0) table->step = -1;
    if (table->row_bytes < (total + 7) / 8) return DPQ_BAD_TABLE;
    /* Products of these sizes are formed below; none may overflow. */
    if (table->row_bytes > INT64_MAX / 8 / (table->n + 1)) return DPQ_BAD_TABLE;
    if (table->size > INT64_MAX / 8 / (table->value_rows + 1)) return DPQ_BAD_TABLE;
    return table->size > INT64_MAX / 64 / table->D ? DPQ_BAD_TABLE : 0;
}

int64_t dpq_lookup(const dpq_table *table, const void *indices, int64_t count, int32_t index_bytes,
                   void *out, int32_t threads) {
    if (count <= 0) return 0;
    if (!indices || !out || (index_bytes != 4 && index_bytes != 8)) return DPQ_BAD_TABLE;
    const dpq_kernels *set = kernels();
    int64_t bad = set->check_indices(indices, count, index_bytes, table->n);
    if (bad >= 0) return -1 - bad;
    dpq_lookup_job job = {table, indices, out, index_bytes, 0};
    int64_t grain = GRAIN_BYTES / (table->D * table->size * dpq_element_bytes(table)) + 1;
    return dpq_parallel(set->lookup, &job, count, grain, threads);
}

typedef struct {
    const dpq_tiers *tiers;
    const uint8_t *indices;
    uint8_t *out;
    int64_t out_bytes; /* of a row */
    const dpq_kernels *set;
    int32_t index_bytes;
} tiers_job;

#define WIDENED 8 /* rows after which they are widened: bytes just written are slow to read wider */

/* The table of a row and its place there, or -1 if the order has no such place. */
static inline int64_t place_of(const dpq_tiers *tiers, int64_t index, const dpq_table **table) {
    int64_t slot = tiers->slot ? tiers->slot[index] : index;
    if (slot < 0 || slot >= tiers->first[tiers->count]) return -1;
    int32_t t = 0;
    while (slot >= tiers->first[t + 1]) t++;
    *table = tiers->tables[t];
    if ((*table)->n == 1) return 0;
    slot -= tiers->first[t];
    return slot < (*table)->n ? slot : -1;
}

static int64_t lookup_in_tiers(const void *argument, int64_t start, int64_t stop) {
    const tiers_job *job = argument;
    const dpq_tiers *tiers = job->tiers;
    int64_t waiting = start;
    for (int64_t i = start; i < stop; i++) {
        if (tiers->widened && i - waiting == WIDENED) {
            for (; waiting < i; waiting++) {
                job->set->widen(job->out + waiting * job->out_bytes, job->out_bytes / 4);
            }
        }
        const dpq_table *table;
        if (i + 8 < stop) {
            int64_t next = place_of(tiers, dpq_index(job->indices, i + 8, job->index_bytes), &table);
            if (next >= 0) {
                const uint8_t *row = table->codes + next * table->row_bytes;
                for (int64_t at = 0; at < table->row_bytes; at += 64) __builtin_prefetch(row + at);
            }
        }
        int64_t index = dpq_index(job->indices, i, job->index_bytes);
        uint8_t *out = job->out + i * job->out_bytes;
        if (index == tiers->padding) {
            memset(out, 0, (size_t)job->out_bytes);
            continue;
        }
        int64_t place = place_of(tiers, index, &table);
        if (place < 0) return DPQ_BAD_TABLE;
        dpq_lookup_job one = {table, (const uint8_t *)&place, out, 8, tiers->widened};
        int64_t code = job->set->lookup(&one, 0, 1);
        if (code) return code < 0 ? code : 1 + index;
    }
    for (; tiers->widened && waiting < stop; waiting++) {
        job->set->widen(job->out + waiting * job->out_bytes, job->out_bytes / 4);
    }
    return 0;
}

int64_t dpq_lookup_tiers(const dpq_tiers *tiers, const void *indices, int64_t count,
                         int32_t index_bytes, void *out, int32_t threads) {
    if (count <= 0) return 0;
    if (!indices || !out || (index_bytes != 4 && index_bytes != 8)) return DPQ_BAD_TABLE;
    if (!tiers || !tiers->tables || !tiers->first || tiers->count < 1) return DPQ_BAD_TABLE;
    const dpq_kernels *set = kernels();
    int64_t bad = set->check_indices(indices, count, index_bytes, tiers->n);
    if (bad >= 0) return -1 - bad;
    const dpq_table *one = tiers->tables[0];
    int64_t bytes = one->D * one->size * dpq_element_bytes(one);
    for (int32_t t = 0; t < tiers->count; t++) {
        const dpq_table *other = tiers->tables[t];
        if (other->D * other->size * dpq_element_bytes(other) != bytes) return DPQ_BAD_TABLE;
        if (tiers->widened && other->value_type != DPQ_FLOAT16) return DPQ_BAD_TABLE;
    }
    if (tiers->widened) bytes *= 2;
    tiers_job job = {tiers, indices, out, bytes, set, index_bytes};
    return dpq_parallel(lookup_in_tiers, &job, count, GRAIN_BYTES / bytes + 1, threads);
}

/* Rows [0, lanes) of h (lanes, d) side by side: (d, width). */
static void interleave(const float *h, int64_t lanes, int64_t d, int64_t width, float *out) {
    for (int64_t i = 0; i < d; i++) {
        for (int64_t w = 0; w < width; w++) out[i * width + w] = w < lanes ? h[w * d + i] : 0;
    }
}

int64_t dpq_logits(const dpq_table *table, const float *h, int64_t batch, float *out,
                   int64_t pitch, int32_t threads) {
    if (batch <= 0 || table->n == 0) return 0;
    if (!h || !out || pitch < table->n) return DPQ_BAD_TABLE;
    const dpq_kernels *set = kernels();
    int64_t d = table->D * table->size, n = table->n, codes = table->largest + 1;
    int permute = set->logits_permute && table->code_bytes < 2 && codes <= 64;
    if (permute) codes = codes <= 32 ? 32 : 64;
    int64_t most = batch < DPQ_LANES ? batch : DPQ_LANES;
    if (!permute) { /* a single group of many codes must fit, too */
        while (most > 1 && codes * most > PARTIAL_FLOATS) most = most > 8 ? 8 : most > 4 ? 4 : 1;
    }
    int64_t room = permute || most == 1 ? most : most <= 4 ? 4 : most <= 8 ? 8 : DPQ_LANES;
    int64_t tile = PARTIAL_FLOATS / (codes * room) / 8 * 8;
    tile = tile < 8 ? 8 : tile > DPQ_TILE ? DPQ_TILE : tile;
    if (codes * room * 8 > PARTIAL_FLOATS) tile = 1;
    if (tile > table->D) tile = table->D;
    float *partial = calloc((size_t)(tile * codes * room), sizeof(float));
    float *side = malloc((size_t)(d * DPQ_LANES) * sizeof(float));
    int64_t result = partial && side ? 0 : DPQ_NO_MEMORY;
    for (int64_t b = 0; b < batch && !result; b += most) {
        int64_t lanes = batch - b < most ? batch - b : most;
        int64_t width = lanes == 1 ? 1 : DPQ_LANES;
        int64_t floats = lanes == 1 ? 1 : lanes <= 4 ? 4 : lanes <= 8 ? 8 : DPQ_LANES;
        interleave(h + b * d, lanes, d, width, side);
        for (int64_t from = 0; from < table->D && !result; from += tile) {
            int64_t to = from + tile < table->D ? from + tile : table->D;
            dpq_partial_job sums = {table, side, partial, from, to, lanes, width, 0, 0, 0};
            dpq_logits_job job = {table, partial, out + b * pitch, pitch, from, to, lanes, floats, 0};
            if (permute) {
                sums.group_pitch = job.pitch = codes;
                sums.code_pitch = 1;
                sums.lane_pitch = codes * (to - from);
            } else {
                sums.group_pitch = job.pitch = codes * floats;
                sums.code_pitch = floats;
                sums.lane_pitch = 1;
            }
            set->partial(&sums);
            int64_t grain = (1 << 21) / ((to - from) * (lanes + 4)) + 64;
            result = dpq_parallel(permute ? set->logits_permute : set->logits, &job, n, grain,
                                  threads);
        }
    }
    free(partial);
    free(side);
    if (!result && table->padding >= 0) {
        for (int64_t b = 0; b < batch; b++) out[b * pitch + table->padding] = 0;
    }
    return result;
}

int64_t dpq_codes(const dpq_query *query, int32_t threads) {
    int32_t bytes = query->out_bytes;
    if (query->tokens < 0 || query->D < 1 || query->key_dim < 1 || query->K < 1 ||
        query->K > 32768 || (query->G != 1 && query->G != query->D) ||
        !query->mean != !query->scale ||
        (query->mean && query->stat_groups != 1 && query->stat_groups != query->D) ||
        query->stride / query->D < query->key_dim || query->distance < DPQ_DOT ||
        query->distance > DPQ_EUCLIDEAN || (bytes != 1 && bytes != 2 && bytes != 8) ||
        (bytes == 1 && query->K > 256)) {
        return DPQ_BAD_TABLE;
    }
    if (query->tokens == 0) return 0;
    if (!query->query || !query->keys || !query->out) return DPQ_BAD_TABLE;
    int64_t grain = (1 << 22) / (query->D * query->K * (query->key_dim + 4)) + 64;
    return dpq_parallel(kernels()->codes, query, query->tokens, grain, threads);
}

int64_t dpq_softmax_gradients(const dpq_softmax *in, int32_t threads) {
    int64_t m = in->features_size, size = in->size, G = in->G, K = in->K;
    if (in->rows < 0 || in->D < 1 || m < 1 || size < 1 || K < 1 || K > 32768 ||
        (G != 1 && G != in->D) || m > 1 << 20 || size > 1 << 20 || in->D > 1 << 20 ||
        in->stride < in->D * m || !in->grad_direction != !in->grad_offset || !in->direction ||
        !in->offset || !in->values || !in->grad_values ||
        (in->rows && (!in->features || !in->codes || !in->grad || !in->grad_features))) {
        return DPQ_BAD_TABLE;
    }
    memset(in->grad_values, 0, (size_t)(G * K * size) * sizeof(float));
    int64_t grain = (1 << 20) / (in->rows * K * (m + size) + 1) + 1;
    return dpq_parallel(kernels()->softmax, in, G, grain, threads);
}

static int clusters_fit(const dpq_clusters *job) {
    int32_t bytes = job->code_bytes;
    return job->n >= 0 && job->D > 0 && job->size > 0 && job->K > 0 && job->K <= 32768 &&
           (job->G == 1 || job->G == job->D) && job->stride >= 0 && job->group_stride >= 0 &&
           job->D <= 1 << 20 && job->size <= 1 << 20 && (!job->n || job->points) &&
           (bytes == 2 || bytes == 8 || (bytes == 1 && job->K <= 256));
}

int64_t dpq_nearest(const dpq_clusters *job, int32_t threads) {
    if (!clusters_fit(job) || !job->centroids || (job->n && !job->codes)) return DPQ_BAD_TABLE;
    int64_t chunks = (job->n + DPQ_CHUNK - 1) / DPQ_CHUNK, count = job->G * job->K;
    float *half = malloc((size_t)count * sizeof(float));
    double *error = job->error ? calloc((size_t)(chunks * job->D) + 1, sizeof(double)) : NULL;
    int64_t result = half && (error || !job->error) ? 0 : DPQ_NO_MEMORY;
    for (int64_t k = 0; k < count && !result; k++) {
        const float *centroid = job->centroids + k * job->size;
        float total = 0;
        for (int64_t i = 0; i < job->size; i++) total = total + centroid[i] * centroid[i];
        half[k] = total * -0.5f;
    }
    dpq_nearest_job all = {job, half, error};
    int64_t grain = (1 << 21) / (DPQ_CHUNK * job->D * (job->K * (job->size + 2) + 64)) + 1;
    if (!result) result = dpq_parallel(kernels()->nearest, &all, chunks, grain, threads);
    for (int64_t i = 0; error && !result && i < chunks * job->D; i++) {
        job->error[i % job->D] += error[i];
    }
    free(half);
    free(error);
    return result;
}

int64_t dpq_sums(const dpq_clusters *job, int32_t threads) {
    if (!clusters_fit(job) || !job->sums || !job->mass || (job->n && !job->codes)) {
        return DPQ_BAD_TABLE;
    }
    int64_t grain = (1 << 18) / (job->n * (job->size + 4) + 1) + 1;
    return dpq_parallel(kernels()->sums, job, job->D, grain, threads);
}

int64_t dpq_first_centroids(const dpq_clusters *job, int32_t threads) {
    if (!clusters_fit(job) || job->n < 1 || !job->draws || !job->first) return DPQ_BAD_TABLE;
    int64_t grain = (1 << 18) / (job->n * job->K * job->size) + 1;
    return dpq_parallel(kernels()->first, job, job->D, grain, threads);
}

static int packable(int64_t n, int64_t D, const uint8_t *bits, int64_t row_bytes, int32_t bytes,
                    dpq_packing_job *job) {
    if (n < 0 || D < 1 || (bytes != 1 && bytes != 2 && bytes != 8)) return 0;
    if (n && (!job->from || !job->to)) return 0;
    int64_t total = 0;
    job->width = bits[0];
    for (int64_t j = 0; j < D; j++) {
        if (bits[j] > 15) return 0;
        if (bits[j] != job->width) job->width = 0;
        total += bits[j];
    }
    return row_bytes >= (total + 7) / 8;
}

int64_t dpq_pack(const void *codes, int32_t code_bytes, int64_t n, int64_t D, const uint8_t *bits,
                 int64_t row_bytes, uint8_t *out, int32_t threads) {
    dpq_packing_job job = {codes, out, bits, D, row_bytes, n, code_bytes, 0};
    if (!packable(n, D, bits, row_bytes, code_bytes, &job)) return DPQ_BAD_TABLE;
    return dpq_parallel(kernels()->pack, &job, n, GRAIN_BYTES / D + 1, threads);
}

int64_t dpq_unpack(const uint8_t *packed, int64_t n, int64_t D, const uint8_t *bits,
                   int64_t row_bytes, void *out, int32_t code_bytes, int32_t threads) {
    dpq_packing_job job = {packed, out, bits, D, row_bytes, n, code_bytes, 0};
    if (!packable(n, D, bits, row_bytes, code_bytes, &job)) return DPQ_BAD_TABLE;
    return dpq_parallel(kernels()->unpack, &job, n, GRAIN_BYTES / D + 1, threads);
}
