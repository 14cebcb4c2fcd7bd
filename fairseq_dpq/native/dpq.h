/* The C interface of the native library: lookup, logits, codes and packing of product codes.
 *
 * Plain pointers and sizes; nothing here knows Python or torch. All functions can be called from
 * several threads at once and after fork(), and none keeps memory between calls but for the threads
 * that they share. Results do not depend on the number of threads or on the instruction set.
 */
#ifndef DPQ_H
#define DPQ_H

#include <stdint.h>

#if defined(__GNUC__)
#define DPQ_EXPORT __attribute__((visibility("default")))
#else
#define DPQ_EXPORT
#endif

enum { DPQ_FLOAT32 = 0, DPQ_FLOAT16 = 1, DPQ_BFLOAT16 = 2 };
enum { DPQ_DOT = 0, DPQ_EUCLIDEAN = 1 };

/* What a call can return besides 0: a table that dpq_prepare refuses, no memory, or a position.
 * -1 - i: the index at position i is not a row of the table.
 * 1 + r: row r of the table has a code that its group does not have. */
#define DPQ_BAD_TABLE INT64_MIN
#define DPQ_NO_MEMORY (INT64_MIN + 1)

/* A compact table. The caller fills in the first part and calls dpq_prepare once. Codes and values
 * need no alignment. */
typedef struct {
    const uint8_t *codes;  /* n rows of row_bytes bytes */
    const uint8_t *values; /* value_rows rows of size elements */
    const int64_t *first;  /* (D) the first value row of each group */
    const uint16_t *last;  /* (D) the largest code of each group */
    const uint8_t *bits;   /* (D) the width of each group's code; only read when packed */
    int64_t n;
    int64_t D;
    int64_t row_bytes;
    int64_t value_rows;
    int64_t size;       /* elements of a value row: d / D */
    int64_t padding;    /* the row that is all zeros, or -1 */
    int32_t code_bytes; /* 1 or 2, or 0 for packed bits */
    int32_t value_type;
    /* Set by dpq_prepare: */
    int64_t step;    /* value rows from one group to the next, or -1 if groups are uneven */
    int32_t width;   /* packed: the width of all codes, or 0 if widths differ */
    int32_t checked; /* whether stored codes can exceed `last` at all */
    int32_t largest; /* the largest entry of `last` */
    int32_t smallest;
} dpq_table;

/* Check a table and fill in its second part: 0 or DPQ_BAD_TABLE. Reads no code and no value. */
DPQ_EXPORT int64_t dpq_prepare(dpq_table *table);

/* Copy the rows of `count` indices (index_bytes 4 or 8) to out (count, D * size), in the values' own
 * type. */
DPQ_EXPORT int64_t dpq_lookup(const dpq_table *table, const void *indices, int64_t count,
                              int32_t index_bytes, void *out, int32_t threads);

/* Several tables of one row size, each with the next rows of one order. */
typedef struct {
    const dpq_table *const *tables;
    const int64_t *first; /* (count + 1) where the rows of each begin; the last: of all of them */
    const int32_t *slot;  /* (n) the place of each row in that order, or null where that is its own */
    int64_t n;
    int64_t padding; /* the row that is all zeros, or -1 */
    int32_t count;
    int32_t widened; /* 1: rows are written as float32; all values are float16 then */
} dpq_tiers;

/* As dpq_lookup. Of a table of a single row, all rows are that one. */
DPQ_EXPORT int64_t dpq_lookup_tiers(const dpq_tiers *tiers, const void *indices, int64_t count,
                                    int32_t index_bytes, void *out, int32_t threads);

/* out (batch, n), rows `pitch` floats apart, = h (batch, D * size) times the transposed table, all
 * float32. Per group the products of h with the value rows are summed once, dimension by dimension; a logit is the sum of
 * D of them, group by group. */
DPQ_EXPORT int64_t dpq_logits(const dpq_table *table, const float *h, int64_t batch, float *out,
                              int64_t pitch, int32_t threads);

typedef struct {
    const float *query;   /* (tokens, D, key_dim), rows `stride` floats apart */
    const float *keys;    /* (G, K, key_dim) */
    const float *mean;    /* (stat_groups, K), or null without statistics */
    const float *scale;   /* (stat_groups, K) */
    void *out;            /* (tokens, D) of out_bytes: 1 (unsigned), 2 or 8 (signed) */
    int64_t tokens;
    int64_t stride;
    int64_t D;
    int64_t key_dim;
    int64_t G;            /* D, or 1 when subspaces are shared */
    int64_t K;
    int64_t stat_groups;  /* D or 1 */
    int32_t distance;
    int32_t out_bytes;
} dpq_query;

/* The codes of queries: the first key of the largest response, a NaN being the largest. Responses are
 * float32 sums, one dimension after the other. */
DPQ_EXPORT int64_t dpq_codes(const dpq_query *query, int32_t threads);

typedef struct {
    const float *features;  /* (rows, D, features_size), rows `stride` floats apart */
    const float *direction; /* (G, K, features_size) */
    const float *offset;    /* (G, K) */
    const float *values;    /* (G, K, size) */
    const int64_t *codes;   /* (rows, D) */
    const float *grad;      /* (rows, D, size) */
    float *grad_features;   /* (rows, D, features_size) */
    float *grad_direction;  /* as direction; all of these are written, not added to. NULL, and */
    float *grad_offset;     /* NULL here too, where keys are constants */
    float *grad_values;
    int64_t rows;
    int64_t stride;
    int64_t D;
    int64_t features_size;
    int64_t G; /* D, or 1 when subspaces are shared */
    int64_t K;
    int64_t size;
} dpq_softmax;

/* Gradients of rows picked by given codes: the values of a code get the row's gradient, and features,
 * directions and offsets that of the softmax of <features, direction> + offset over the values. */
DPQ_EXPORT int64_t dpq_softmax_gradients(const dpq_softmax *job, int32_t threads);

/* Points and centroids of k-means, each group on its own. */
typedef struct {
    const float *points;    /* (n, D, size): rows `stride` and groups `group_stride` floats apart */
    const float *centroids; /* (G, K, size); read by dpq_nearest */
    const float *weights;   /* (n), or null where each point counts once; read by dpq_sums */
    void *codes;            /* (n, D) of code_bytes: 1 or 2 (unsigned), or 8 */
    double *error;          /* (D), or null; dpq_nearest adds the squared distances */
    double *sums;           /* (D, K, size); dpq_sums adds the weighted points */
    double *mass;           /* (D, K); dpq_sums adds the weights */
    const double *draws;    /* (D, K), in [0, 1); read by dpq_first_centroids */
    float *first;           /* (D, K, size); written by dpq_first_centroids */
    int64_t n;
    int64_t stride;
    int64_t group_stride;
    int64_t D;
    int64_t size;
    int64_t G; /* D, or 1 when groups share their centroids */
    int64_t K;
    int32_t code_bytes;
} dpq_clusters;

/* The codes of the nearest centroids, the first of several; 0 for a point that has no distance. */
DPQ_EXPORT int64_t dpq_nearest(const dpq_clusters *job, int32_t threads);

/* The sums of the points of each code, in float64 and in the order of the rows. A code out of range
 * gives 1 + its row. */
DPQ_EXPORT int64_t dpq_sums(const dpq_clusters *job, int32_t threads);

/* Centroids to begin with, by k-means++: each next one is a point, drawn by its squared distance from
 * the nearest of those before it. Needs at least one point. */
DPQ_EXPORT int64_t dpq_first_centroids(const dpq_clusters *job, int32_t threads);

/* Pack codes (n, D) of code_bytes 1, 2 or 8 into rows of row_bytes bytes, and back. */
DPQ_EXPORT int64_t dpq_pack(const void *codes, int32_t code_bytes, int64_t n, int64_t D,
                            const uint8_t *bits, int64_t row_bytes, uint8_t *out, int32_t threads);
DPQ_EXPORT int64_t dpq_unpack(const uint8_t *packed, int64_t n, int64_t D, const uint8_t *bits,
                              int64_t row_bytes, void *out, int32_t code_bytes, int32_t threads);

/* The instruction set in use: "avx512", "avx2" or "baseline". */
DPQ_EXPORT const char *dpq_variant(void);

/* A hash of the sources that this library was built from. */
DPQ_EXPORT const char *dpq_source_hash(void);

#endif
