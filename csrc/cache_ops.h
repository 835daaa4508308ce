// The contract of ops on rows that have a past: rotation, and keys and values in pages. See ops.h,
// whose types it uses.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// Turns pairs of features by their token's angles, in place and in f32:
// (a, b) = (a cos - b sin, b cos + a sin).
struct RotaryParams {
    void* x;                      // [total_tokens, num_heads, head_dim], dtype
    const float* cos;             // [num_positions, num_pairs]
    const float* sin;             // as cos
    const int32_t* position_ids;  // [total_tokens]; on a CPU one outside the tables throws
    int64_t total_tokens;
    int64_t num_positions;
    int32_t num_heads;
    int32_t head_dim;
    int32_t num_pairs;    // at most head_dim / 2
    bool is_interleaved;  // pairs (2 i, 2 i + 1), not (i, i + num_pairs)
    int64_t x_stride;     // elements from row to row
    DType dtype;          // f32 or bf16 on a CPU
};

void rotary(const RotaryParams& p, const Launch& launch);

// Rows of k and v into slots of the cache; no slot may be written twice.
struct WriteKvParams {
    const void* k;                // [total_tokens, row_elements], dtype
    const void* v;                // as k
    void* k_cache;                // [num_slots, row_elements], contiguous
    void* v_cache;                // as k_cache
    const int32_t* slot_mapping;  // [total_tokens]; -1: nowhere; on a CPU any other outside throws
    int64_t total_tokens;
    int64_t num_slots;
    int64_t row_elements;  // num_kv_heads * head_dim
    int64_t k_stride;      // elements from row to row
    int64_t v_stride;
    DType dtype;
};

void write_kv(const WriteKvParams& p, const Launch& launch);

// cuda only. Heads of q and k normalized as by rms_norm, where weights are given, and turned as by
// rotary; q in place, k and v to their slots, as by write_kv. Keeps f32 between these steps.
// Without a cache k is in place, too, and v is not read.
struct RotaryWriteKvParams {
    void* q;                      // [total_tokens, num_heads, head_dim], dtype
    void* k;                      // [total_tokens, num_kv_heads, head_dim]
    const void* v;                // as k
    void* k_cache;                // [num_slots, num_kv_heads, head_dim], contiguous, or null
    void* v_cache;                // as k_cache
    uint8_t* k_scales;            // [pages, num_kv_heads, page_size], where k_cache is E4M3 codes
    uint8_t* v_scales;            // as k_scales; both or neither
    const float* cos;             // [positions, num_pairs]
    const float* sin;             // as cos
    const void* q_norm;           // [head_dim], dtype, or null for none
    const void* k_norm;           // as q_norm; both or neither
    const int32_t* position_ids;  // [total_tokens]
    const int32_t* slot_mapping;  // [total_tokens]; -1: nowhere
    int64_t total_tokens;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t num_pairs;  // at most head_dim / 2; 0: nothing turns
    int32_t page_size;  // where there are scales
    bool is_interleaved;
    int64_t q_stride;  // elements from row to row
    int64_t k_stride;
    int64_t v_stride;
    float eps;
    DType dtype;
};

void rotary_write_kv(const RotaryWriteKvParams& p, const Launch& launch);

// cpu only. Causal attention of each sequence's last rows over keys and values in pages. Row
// r of sequence i stands at position kv_seqlens[i] - seqlen + r and sees the keys up to its own; no
// other is read, up to one before a window. With a softcap, scaled scores s become softcap * tanh(s
// / softcap); then that of a row at i and a key at j gets slope * (j - i), of the row's head.
struct PagedAttentionParams {
    const void* q;              // [total_tokens, num_heads, head_dim], dtype
    const void* k_cache;        // [num_pages, page_size, num_kv_heads, head_dim], contiguous
    const void* v_cache;        // as k_cache
    void* out;                  // as q, contiguous
    const int32_t* cu_seqlens;  // [batch_size + 1], starts at 0, ends at total_tokens
    const int32_t* page_table;  // [batch_size, max_pages]
    const int32_t* kv_seqlens;  // [batch_size], this step's rows included
    const float* alibi_slopes;  // [num_heads], or null for none
    void* workspace;            // paged_attention_workspace_bytes(), any content
    int64_t workspace_bytes;
    int64_t batch_size;
    int64_t total_tokens;
    int64_t num_pages;
    int64_t max_pages;
    int32_t page_size;  // a power of two, 2 or more: the two keys of a bf16 pair lie in one page
    int32_t num_heads;
    int32_t num_kv_heads;  // divides num_heads
    int32_t head_dim;
    int32_t window;    // as above
    int64_t q_stride;  // elements from row to row
    float softmax_scale;
    float softcap;  // 0: none
    DType dtype;    // f32 or bf16 on a CPU
    // A row has the same bits in a piece of one row as in any other; decode reads keys slower.
    bool batch_invariant;
    const uint8_t* k_scales;  // [num_pages, num_kv_heads, page_size], where k_cache is E4M3 codes
    const uint8_t* v_scales;  // as k_scales; both or neither
};

// cuda only. What each CTA of planned_paged_attention does, from lengths on the device: made once a
// step, shared by all layers of one window. Host integers may be bounds, so that a captured step
// serves any lengths below them.
struct PagedPlanParams {
    const int32_t* cu_seqlens;  // [batch_size + 1]; a sequence may have no rows
    const int32_t* kv_seqlens;  // [batch_size]
    int32_t* plan;              // paged_plan_bytes(), any content
    int64_t plan_bytes;
    int64_t batch_size;
    int64_t total_tokens;
    int32_t max_seqlen;
    int32_t max_kv_seqlen;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t window;
    int32_t tile_tokens;  // paged_tile_tokens()
    // A row has the same bits in pieces of any size and in any batch: all go through prefill tiles,
    // and tile_tokens must not be 0.
    bool batch_invariant;
};

// Tokens of a prefill tile; 0 where the heads are too many, and decode items serve all pieces.
int32_t paged_tile_tokens(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim);
int64_t paged_plan_bytes(const PagedPlanParams& p);
void paged_plan(const PagedPlanParams& p, const Launch& launch);

// cuda only. As PagedAttentionParams, f16 or bf16; head_dim a multiple of 8 up to 256, above 128 at
// most 8 query heads a key head, and no sequence of more than one row.
// With scales, E4M3 codes (cuda/kv_codes.cuh) of 16 features' multiples in pages of 16 keys or
// more, for decode rows alone. early_read: 0 nothing; 1 plan, lengths and page table; 2 also the
// keys before each sequence's rows.
struct PlannedPagedAttentionParams {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    const uint8_t* k_scales;  // [num_pages, num_kv_heads, page_size], where k_cache is E4M3 codes
    const uint8_t* v_scales;  // as k_scales; both or neither
    void* out;
    const int32_t* page_table;  // [batch_size, max_pages]
    const float* alibi_slopes;  // [num_heads], or null for none
    PagedPlanParams plan;       // as it was made
    void* workspace;            // planned_paged_attention_workspace_bytes(), any content
    int64_t workspace_bytes;
    int64_t max_pages;
    int32_t page_size;
    int64_t q_stride;
    float softmax_scale;
    float softcap;  // 0: none
    DType dtype;
    int32_t early_read;  // reads allowed before the preceding kernel has ended (PDL)
};
int64_t planned_paged_attention_workspace_bytes(const PagedPlanParams& p);
void planned_paged_attention(const PlannedPagedAttentionParams& p, const Launch& launch);

// Reads the lengths, as only a CPU can: decode rows need room by the keys that they have.
int64_t paged_attention_workspace_bytes(const PagedAttentionParams& p, int num_threads);
void paged_attention(const PagedAttentionParams& p, const Launch& launch);

}  // namespace bytetx
