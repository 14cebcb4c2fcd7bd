/* The table of kernels of one instruction set. */
#include "internal.h"

int64_t DPQ_NAME(dpq_check_indices)(const uint8_t *, int64_t, int32_t, int64_t);
int64_t DPQ_NAME(dpq_lookup_rows)(const void *, int64_t, int64_t);
void DPQ_NAME(dpq_widen_row)(uint8_t *, int64_t);
void DPQ_NAME(dpq_partial)(const dpq_partial_job *);
int64_t DPQ_NAME(dpq_logits_rows)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_logits_permute)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_codes_rows)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_softmax_groups)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_nearest_chunks)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_sums_groups)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_first_groups)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_unpack_rows)(const void *, int64_t, int64_t);
int64_t DPQ_NAME(dpq_pack_rows)(const void *, int64_t, int64_t);

#define DPQ_TEXT_(name) #name
#define DPQ_TEXT(name) DPQ_TEXT_(name)

const dpq_kernels DPQ_NAME(dpq_kernels) = {
    .name = DPQ_TEXT(DPQ_VARIANT),
    .check_indices = DPQ_NAME(dpq_check_indices),
    .lookup = DPQ_NAME(dpq_lookup_rows),
    .widen = DPQ_NAME(dpq_widen_row),
    .partial = DPQ_NAME(dpq_partial),
    .logits = DPQ_NAME(dpq_logits_rows),
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    .logits_permute = DPQ_NAME(dpq_logits_permute),
#endif
    .codes = DPQ_NAME(dpq_codes_rows),
    .softmax = DPQ_NAME(dpq_softmax_groups),
    .nearest = DPQ_NAME(dpq_nearest_chunks),
    .sums = DPQ_NAME(dpq_sums_groups),
    .first = DPQ_NAME(dpq_first_groups),
    .unpack = DPQ_NAME(dpq_unpack_rows),
    .pack = DPQ_NAME(dpq_pack_rows),
};
