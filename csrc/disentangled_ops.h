// The contract of disentangled attention (DeBERTa), which cpu/ and cuda/ both implement; see ops.h.
#pragma once

#include "ops.h"

namespace bytetx {

// out = softmax(softmax_scale * s) v within each sequence and head, accumulated in f32, where
//   s(i, j) = q[i] . k[j] + q[i] . pos_k[b] + k[j] . pos_q[b]        b = buckets[i - j + span - 1]
// over positions i, j in the sequence. pos_k or pos_q may be null: its term is 0.
struct DisentangledAttentionParams {
    const void* q;              // [total_tokens, num_heads, head_dim], dtype
    const void* k;              // as q
    const void* v;              // as q
    void* out;                  // as q
    const void* pos_k;          // [num_buckets, num_heads, head_dim], contiguous, or null
    const void* pos_q;          // as pos_k
    const int32_t* buckets;     // [2 * span - 1] in [0, num_buckets), each as the one before or
                                // one more; not read where pos_k and pos_q are null
    const int32_t* cu_seqlens;  // [batch_size + 1], starts at 0, ends at total_tokens; cuda: its
                                // end may be below total_tokens, rows behind it are padding
    void* workspace;            // cpu: disentangled_attention_workspace_bytes(), any content
    int64_t workspace_bytes;
    int64_t batch_size;
    int64_t total_tokens;
    int32_t span;  // no sequence is longer
    int32_t num_buckets;
    int32_t num_heads;
    int32_t head_dim;  // cuda: a multiple of 8 up to 128
    int64_t q_stride;  // elements from row to row; cuda: multiples of 8
    int64_t k_stride;
    int64_t v_stride;
    int64_t out_stride;
    float softmax_scale;  // > 0
    DType dtype;          // cpu: f32 or bf16; cuda: f16 or bf16
};

int64_t disentangled_attention_workspace_bytes(int64_t batch_size, int32_t head_dim,
                                               int num_threads);
void disentangled_attention(const DisentangledAttentionParams& p, const Launch& launch);

}  // namespace bytetx
