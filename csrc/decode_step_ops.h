// The contract of the decode step of one sequence as one kernel. See ops.h, whose types it uses.
#pragma once

#include <array>
#include <cstdint>

#include "ops.h"

namespace bytetx {

constexpr int kMaxDecodeStepLayers = 64;

// Weights are bf16 and contiguous; rows of q, then k, then v; gates and values of ffn_in take turns
// in blocks of 32 rows.
struct DecodeStepLayer {
    const void* qkv;        // [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    const void* attn_out;   // [hidden_size, num_heads * head_dim]
    const void* ffn_in;     // [2 * inner_size, hidden_size]
    const void* ffn_out;    // [hidden_size, inner_size]
    const void* attn_norm;  // [hidden_size]
    const void* ffn_norm;   // [hidden_size]
    const void* q_norm;     // [head_dim], or null for none
    const void* k_norm;     // as q_norm; both or neither
    const void* qkv_bias;   // [rows of qkv], or null; all layers or none
    void* k_cache;          // [num_pages, page_size, num_kv_heads, head_dim]
    void* v_cache;          // as k_cache
};

// cuda only. All layers and the last norm of a pre-norm decoder for one new token; its keys and
// values are written to their slot.
struct DecodeStepParams {
    const void* x;                // [hidden_size], bf16: the embedded token
    void* out;                    // [hidden_size], bf16
    const void* final_norm;       // [hidden_size]
    const float* cos;             // [positions, head_dim / 2]
    const float* sin;             // as cos
    const int32_t* position_ids;  // [1]
    const int32_t* kv_seqlens;    // [1], the new token among them
    const int32_t* slot_mapping;  // [1]; -1: nowhere
    const int32_t* page_table;    // [pages of the sequence]
    void* workspace;              // zeros before the first call; calls run one after another
    int32_t page_size;            // a power of two
    int32_t one_cta_keys;         // up to so many earlier keys, one CTA has all of a KV head
    int32_t num_layers;
    int32_t hidden_size;
    int32_t inner_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    float eps;
    float softmax_scale;
    std::array<DecodeStepLayer, kMaxDecodeStepLayers> layers;
};

void decode_step(const DecodeStepParams& p, const Launch& launch);

// 0 where no kernel takes these sizes, or the device has too few SMs. has_bias: qkv has.
int64_t decode_step_workspace_bytes(int32_t device, int32_t hidden_size, int32_t inner_size,
                                    int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
                                    bool has_bias);

}  // namespace bytetx
