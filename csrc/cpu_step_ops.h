// The contract of a CPU's decode step: all layers for a few sequences' next tokens in one call. See
// ops.h, whose types it uses.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ops.h"
#include "panel_ops.h"

namespace bytetx {

// A norm of rows: layer_norm, or rms_norm where is_rms.
struct StepNorm {
    const void* weight;  // [width], dtype; null: no norm
    const void* bias;    // [width], or null for none
    float eps;
    bool is_rms;
};

// One layer, which is pre-norm: x += attention(norm(x)), x += feed_forward(norm(x)). Norms of what
// is added, attn_out_norm and ffn_out_norm, may be given as well.
struct CpuStepLayer {
    PanelMatrix qkv;       // rows of q, then k, then v
    PanelMatrix attn_out;  // [hidden_size, num_heads * head_dim]
    PanelMatrix ffn_in;    // [inner_size, hidden_size], or of twice the rows where there are gates
    PanelMatrix ffn_out;   // [hidden_size, inner_size]
    StepNorm attn_norm;
    StepNorm attn_out_norm;
    StepNorm ffn_norm;
    StepNorm ffn_out_norm;
    const void* q_norm;  // [head_dim], dtype, an RMS norm of each head, or null for none
    const void* k_norm;  // as q_norm; both or neither
    void* k_cache;       // [num_pages, page_size, num_kv_heads, head_dim], dtype
    void* v_cache;       // as k_cache
    const float* cos;    // [num_positions, num_pairs], or null: nothing turns
    const float* sin;    // as cos
    int64_t num_positions;
    int32_t num_pairs;  // at most head_dim / 2
    bool is_interleaved;
    int32_t window;  // keys a row sees, its own the last of them; 0: from the sequence's first
    float softmax_scale;
};

class CpuStepLayers {  // made once from Python's NamedTuples
  public:
    explicit CpuStepLayers(std::vector<CpuStepLayer> layers) : layers_(std::move(layers)) {}
    const std::vector<CpuStepLayer>& layers() const { return layers_; }

  private:
    std::vector<CpuStepLayer> layers_;
};

// cpu only, on processors with AVX2 or NEON. All layers and the last norm for the next token of
// each sequence; their keys and values are written to their slots. Each step of it has the bits of
// the operation that it stands for: rms_norm, panel_linear, rotary, write_kv, paged_attention,
// gate_blocks.
struct CpuDecodeStepParams {
    const CpuStepLayers* layers;
    const void* x;  // [batch_size, hidden_size], dtype: the embedded tokens
    void* out;      // as x
    StepNorm final_norm;
    const int32_t* position_ids;  // [batch_size]
    const int32_t* cu_seqlens;    // [batch_size + 1]: 0, 1, 2, ...
    const int32_t* kv_seqlens;    // [batch_size], the new tokens among them
    const int32_t* slot_mapping;  // [batch_size]; -1: nowhere
    const int32_t* page_table;    // [batch_size, max_pages]
    const float* alibi_slopes;    // [num_heads], or null for none
    void* workspace;              // cpu_decode_step_workspace_bytes(), 64-byte aligned, any content
    int64_t workspace_bytes;
    int64_t batch_size;
    int64_t num_pages;
    int64_t max_pages;
    int32_t page_size;
    int32_t hidden_size;
    int32_t inner_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t gate_block;     // gates and values of ffn_in take turns in such blocks; 0: no gates
    float head_norm_eps;    // for q_norm and k_norm
    float softcap;          // as in PagedAttentionParams
    Activation activation;  // for gates, or for ffn_in
    DType dtype;            // f32 or bf16
    bool batch_invariant;   // as in PagedAttentionParams
};

// Reads the lengths and windows, by which attention needs room.
int64_t cpu_decode_step_workspace_bytes(const CpuStepLayers* layers, const int32_t* cu_seqlens,
                                        const int32_t* kv_seqlens, int64_t batch_size,
                                        int32_t hidden_size, int32_t inner_size, int32_t num_heads,
                                        int32_t num_kv_heads, int32_t head_dim, int32_t gate_block,
                                        DType dtype, bool batch_invariant, int num_threads);
void cpu_decode_step(const CpuDecodeStepParams& p, const Launch& launch);

}  // namespace bytetx
