/* Calls every exported function with random shapes, good and damaged data, and buffers of exactly the
 * size that each call may touch, so that a sanitizer sees one byte too many. Then the same from eight
 * threads at once and, between two such times, in a forked child.
 * Usage: fuzz ROUNDS [SEED] */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/wait.h>
#include <unistd.h>

#include "dpq.h"

static _Thread_local uint64_t state;

static int64_t below(int64_t limit) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)(state % (uint64_t)limit);
}

static void *bytes(int64_t size) {
    uint8_t *out = malloc((size_t)(size ? size : 1));
    for (int64_t i = 0; i < size; i++) out[i] = (uint8_t)below(256);
    return out;
}

static float *floats(int64_t count) {
    float *out = malloc((size_t)(count ? count : 1) * sizeof(float));
    for (int64_t i = 0; i < count; i++) out[i] = (float)(below(17) - 8);
    if (count && below(20) == 0) out[below(count)] = __builtin_nanf("");
    return out;
}

static int64_t pick(const int64_t *from, int64_t count) { return from[below(count)]; }
#define PICK(...) \
    pick((int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static atomic_long failures;
static void expect(int good, const char *what) {
    if (good) return;
    failures++;
    fprintf(stderr, "wrong: %s\n", what);
}

/* The same table twice, and its first row for some more: rows are those of the table itself. */
static void fuzz_tiers(const dpq_table *table, const uint8_t *indices, int64_t count, int32_t width,
                       int32_t threads, int64_t bad, int damaged) {
    int64_t n = table->n, d = table->D * table->size;
    if (!n) return;
    dpq_table single = *table;
    single.n = 1, single.padding = -1;
    const dpq_table *tables[] = {table, &single, table};
    int64_t first[] = {0, n, n + 3, 2 * n + 3};
    int32_t *slot = malloc((size_t)(2 * n + 3) * sizeof *slot);
    for (int64_t i = 0; i < 2 * n + 3; i++) slot[i] = (int32_t)(2 * n + 2 - i);
    dpq_tiers tiers = {.tables = tables, .first = first, .slot = below(2) ? slot : NULL,
                       .n = 2 * n + 3, .padding = below(2) ? below(n) : -1, .count = 3,
                       .widened = (int32_t)below(2)};
    int fits = !tiers.widened || table->value_type == DPQ_FLOAT16;
    int64_t element = table->value_type == DPQ_FLOAT32 || tiers.widened ? 4 : 2;
    uint8_t *out = malloc((size_t)(count * d * element + 1));
    int64_t code = dpq_lookup_tiers(&tiers, indices, count, width, out, threads);
    int past = bad >= 0 && dpq_lookup_tiers(&tiers, indices, bad, width, out, threads) >= 0;
    if (!fits) expect(!count || code == DPQ_BAD_TABLE || (bad >= 0 && code == -1 - bad), "widened");
    else if (bad >= 0) expect(past || damaged, "tiers before a bad index");
    else expect(damaged ? code >= 0 && code <= 2 * n + 3 : code == 0, "tiers");
    if (n > 1) {
        slot[0] = (int32_t)(2 * n + 3); /* a place that is not there */
        tiers.slot = slot, tiers.widened = 0, tiers.padding = -1;
        int64_t zero = 0;
        uint8_t *row = malloc((size_t)(d * 4));
        expect(dpq_lookup_tiers(&tiers, &zero, 1, 8, row, 1) == DPQ_BAD_TABLE, "slot");
        free(row);
    }
    free(out), free(slot);
}

static void fuzz_table(void) {
    int64_t D = PICK(1, 2, 3, 7, 8, 16, 17, 65, 300), n = PICK(0, 1, 2, 15, 64, 65, 130);
    int64_t most = PICK(1, 2, 5, 32, 33, 64, 200, 256, 300, 4000), size = PICK(1, 2, 3, 4, 8, 16, 33);
    int shared = below(3) == 0, packed = below(2) == 0, damaged = below(3) == 0;
    int64_t *first = malloc((size_t)D * sizeof *first), rows = 0, total = 0;
    uint16_t *last = malloc((size_t)D * sizeof *last);
    uint8_t *bits = malloc((size_t)D);
    int uneven = !shared && below(2) == 0;
    for (int64_t j = 0; j < D; j++) {
        int64_t own = uneven ? 1 + below(most) : most;
        first[j] = shared ? 0 : rows;
        rows = shared ? own : rows + own;
        last[j] = (uint16_t)(own - 1);
        bits[j] = 0;
        while ((int64_t)1 << bits[j] < own) bits[j]++;
        total += bits[j];
    }
    int32_t code_bytes = packed ? 0 : most <= 256 ? 1 : 2;
    int64_t row_bytes = packed ? (total + 7) / 8 : D * code_bytes;
    if (row_bytes == 0) row_bytes = 1;
    uint8_t *codes = bytes(n * row_bytes);
    if (!damaged) {
        int64_t *good = malloc((size_t)(n * D + 1) * sizeof *good);
        for (int64_t i = 0; i < n * D; i++) good[i] = below(last[i % D] + 1);
        if (packed) {
            expect(dpq_pack(good, 8, n, D, bits, row_bytes, codes, 2) == 0, "pack");
            int64_t *back = malloc((size_t)(n * D + 1) * sizeof *back);
            expect(dpq_unpack(codes, n, D, bits, row_bytes, back, 8, 2) == 0, "unpack");
            expect(!memcmp(back, good, (size_t)(n * D) * sizeof *back), "unpacked codes");
            free(back);
        } else {
            for (int64_t i = 0; i < n * D; i++) memcpy(codes + i * code_bytes, &good[i], (size_t)code_bytes);
        }
        free(good);
    }
    int32_t type = (int32_t)below(3);
    int64_t element = type == DPQ_FLOAT32 ? 4 : 2;
    uint8_t *values = bytes(rows * size * element);
    dpq_table table = {.codes = codes, .values = values, .first = first, .last = last, .bits = bits,
                       .n = n, .D = D, .row_bytes = row_bytes, .value_rows = rows, .size = size,
                       .padding = n && below(2) ? below(n) : -1, .code_bytes = code_bytes,
                       .value_type = type};
    expect(dpq_prepare(&table) == 0, "prepare");
    int64_t count = n ? below(40) : 0;
    int32_t width = below(2) ? 8 : 4, threads = 1 + (int32_t)below(3);
    uint8_t *indices = malloc((size_t)(count * width + 1));
    int64_t bad = -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t index = below(n);
        if (below(300) == 0) {
            index = below(2) ? -1 : n;
            bad = bad < 0 ? i : bad;
        }
        memcpy(indices + i * width, &index, (size_t)width);
    }
    uint8_t *out = malloc((size_t)(count * D * size * element + 1));
    int64_t code = dpq_lookup(&table, indices, count, width, out, threads);
    expect(bad >= 0 ? code == -1 - bad : damaged ? code >= 0 && code <= n : code == 0, "lookup");
    int64_t batch = PICK(0, 1, 2, 4, 5, 16, 17);
    float *h = floats(batch * D * size), *logits = malloc((size_t)(batch * n + 1) * sizeof(float));
    expect(!batch || !n || dpq_logits(&table, h, batch, logits, n - 1, 1) == DPQ_BAD_TABLE, "pitch");
    code = dpq_logits(&table, h, batch, logits, n, threads);
    expect(damaged ? code >= 0 && code <= n : code == 0, "logits");
    fuzz_tiers(&table, indices, count, width, threads, bad, damaged);
    table.value_rows = first[D - 1] + last[D - 1];
    expect(dpq_prepare(&table) == DPQ_BAD_TABLE, "too few values");
    free(h), free(logits), free(out), free(indices), free(values), free(codes);
    free(first), free(last), free(bits);
}

static void fuzz_codes(void) {
    int64_t tokens = PICK(0, 1, 2, 63, 64, 65, 130), D = PICK(1, 2, 5), size = PICK(1, 2, 3, 4, 8, 9, 16, 30);
    int64_t K = PICK(1, 2, 7, 32, 300), G = below(2) ? 1 : D, stats = below(2) ? 1 : D;
    int32_t width = K > 256 ? (int32_t)PICK(2, 8) : (int32_t)PICK(1, 2, 8);
    float *query = floats(tokens * D * size), *keys = floats(G * K * size);
    float *mean = floats(stats * K), *scale = floats(stats * K);
    uint8_t *out = malloc((size_t)(tokens * D * width + 1));
    int given = below(2) == 0;
    dpq_query job = {.query = query, .keys = keys, .mean = given ? mean : NULL,
                     .scale = given ? scale : NULL, .out = out, .tokens = tokens,
                     .stride = D * size, .D = D, .key_dim = size, .G = G, .K = K,
                     .stat_groups = stats, .distance = (int32_t)below(2), .out_bytes = width};
    expect(dpq_codes(&job, 1 + (int32_t)below(3)) == 0, "codes");
    for (int64_t i = 0; i < tokens * D; i++) {
        int64_t code = 0;
        memcpy(&code, out + i * width, (size_t)width);
        expect(code >= 0 && code < K, "a code in range");
    }
    free(query), free(keys), free(mean), free(scale), free(out);
}

static void fuzz_gradients(void) {
    int64_t rows = PICK(0, 1, 3, 70), D = PICK(1, 2, 5), m = PICK(1, 2, 3, 4, 8, 9);
    int64_t K = PICK(1, 2, 15, 16, 17, 32, 300), size = PICK(1, 2, 4, 8, 11), G = below(2) ? 1 : D;
    int64_t stride = D * m + below(3);
    float *features = floats(rows * stride), *direction = floats(G * K * m), *offset = floats(G * K);
    float *values = floats(G * K * size), *grad = floats(rows * D * size);
    float *out = floats(rows * D * m), *to = floats(G * K * m), *to_offset = floats(G * K);
    float *to_values = floats(G * K * size);
    int64_t *codes = bytes(rows * D * 8);
    for (int64_t i = 0; i < rows * D; i++) codes[i] = below(K);
    int damaged = rows && below(8) == 0;
    if (damaged) codes[below(rows * D)] = below(2) ? K + below(3) : -1 - below(3);
    int of_keys = below(2) == 0;
    dpq_softmax job = {features, direction, offset, values, codes, grad, out, of_keys ? to : NULL,
                       of_keys ? to_offset : NULL, to_values, rows, stride, D, m, G, K, size};
    int64_t code = dpq_softmax_gradients(&job, 1 + (int32_t)below(3));
    expect(damaged ? code > 0 && code <= rows : code == 0, "gradients");
    job.stride = D * m - 1;
    expect(dpq_softmax_gradients(&job, 1) == DPQ_BAD_TABLE, "rows that overlap");
    job.stride = stride, job.grad_direction = to, job.grad_offset = NULL;
    expect(dpq_softmax_gradients(&job, 1) == DPQ_BAD_TABLE, "half of the keys' gradient");
    free(features), free(direction), free(offset), free(values), free(grad), free(out), free(to);
    free(to_offset), free(to_values), free(codes);
}

static void fuzz_clusters(void) {
    int64_t n = PICK(0, 1, 2, 63, 64, 65, 130, 700), D = PICK(1, 2, 5), size = PICK(1, 2, 3, 4, 8, 9, 64);
    int64_t K = PICK(1, 2, 7, 32, 256, 300), G = below(2) ? 1 : D;
    int by_group = below(2) == 0;
    int64_t group_stride = by_group ? n * size : size + below(2);
    int64_t stride = by_group ? size : D * group_stride + below(3);
    int64_t room = n ? (n - 1) * stride + (D - 1) * group_stride + size : 0;
    int32_t bytes = K > 256 ? (int32_t)PICK(2, 8) : (int32_t)PICK(1, 2, 8), threads = 1 + (int32_t)below(3);
    float *points = floats(room), *centroids = floats(G * K * size), *weights = floats(n);
    float *first = floats(D * K * size);
    uint8_t *codes = malloc((size_t)(n * D * bytes + 1));
    double *error = calloc((size_t)D, sizeof *error), *sums = calloc((size_t)(D * K * size), sizeof *sums);
    double *mass = calloc((size_t)(D * K), sizeof *mass), *draws = malloc((size_t)(D * K) * sizeof *draws);
    for (int64_t i = 0; i < D * K; i++) draws[i] = (double)below(1000) / 1000;
    dpq_clusters job = {.points = points, .centroids = centroids, .weights = below(2) ? weights : NULL,
                        .codes = codes, .error = below(2) ? error : NULL, .sums = sums, .mass = mass,
                        .draws = draws, .first = first, .n = n, .stride = stride,
                        .group_stride = group_stride, .D = D, .size = size, .G = G, .K = K,
                        .code_bytes = bytes};
    expect(dpq_nearest(&job, threads) == 0, "nearest");
    for (int64_t i = 0; i < n * D; i++) {
        int64_t code = 0;
        memcpy(&code, codes + i * bytes, (size_t)bytes);
        expect(code >= 0 && code < K, "a nearest centroid");
    }
    expect(dpq_sums(&job, threads) == 0, "sums");
    double total = 0;
    for (int64_t i = 0; i < D * K; i++) total += mass[i];
    expect(job.weights || total == (double)(n * D), "the number of points");
    expect(dpq_first_centroids(&job, threads) == (n ? 0 : DPQ_BAD_TABLE), "first centroids");
    if (n && (bytes > 1 || K < 256)) {
        int64_t at = below(n * D), bad = bytes == 8 && below(2) ? -1 : K;
        memcpy(codes + at * bytes, &bad, (size_t)bytes);
        expect(dpq_sums(&job, threads) == 1 + at / D, "sums of a bad code");
    }
    job.stride = -1;
    expect(dpq_nearest(&job, 1) == DPQ_BAD_TABLE && dpq_sums(&job, 1) == DPQ_BAD_TABLE, "a stride");
    free(points), free(centroids), free(weights), free(first), free(codes), free(error), free(sums);
    free(mass), free(draws);
}

static void rounds_of(long rounds, uint64_t seed) {
    state = 88172645463325252u ^ seed * 0x9E3779B97F4A7C15u;
    for (long i = 0; i < rounds; i++) fuzz_table(), fuzz_codes(), fuzz_gradients(), fuzz_clusters();
}

#define THREADS 8
static long shared_rounds;
static uint64_t base;

static void *in_thread(void *number) {
    rounds_of(shared_rounds, base + 1 + (uint64_t)(uintptr_t)number);
    return NULL;
}

static void at_once(long rounds) {
    pthread_t ids[THREADS];
    shared_rounds = rounds;
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&ids[i], NULL, in_thread, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(ids[i], NULL);
}

int main(int count, char **arguments) {
    long rounds = count > 1 ? atol(arguments[1]) : 1000, few = rounds / 20 + 1;
    base = count > 2 ? (uint64_t)atoll(arguments[2]) : 0;
    rounds_of(rounds, base);
    at_once(few);
    pid_t child = fork();
    if (child == 0) {
        rounds_of(few, base + 100);
        _exit(failures != 0);
    }
    at_once(few);
    int status = 1;
    expect(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a forked child");
    printf("%s: %ld rounds, seed %llu, %ld failures\n", dpq_variant(), rounds,
           (unsigned long long)base, (long)failures);
    return failures != 0;
}
