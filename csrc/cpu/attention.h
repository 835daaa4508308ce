// Shared by the attention launchers (attention.cpp, paged_attention.cpp) and the kernels of each
// instruction set.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx::cpu {

// Both ops as their kernels see them: packed rows of k and v, or pages; a tree's are of one row.
struct AttentionInput {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    const int32_t* cu_seqlens;
    const int32_t* kv_seqlens;      // null: as many keys as queries, or pages of a tree
    const int32_t* page_table;      // null: k and v are packed rows
    int64_t max_pages;              // entries of page_table a sequence
    const int64_t* cu_pages;        // a tree's: where each sequence's entries begin; else null
    const float* relative_bias;     // null: none
    const int32_t* bias_positions;  // null: index in the sequence
    int32_t relative_bias_span;
    int32_t page_shift;  // log2 of the page size
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t window;
    bool causal;
    int64_t q_stride;
    int64_t k_stride;
    int64_t v_stride;
    int64_t out_stride;
    float softmax_scale;
    float softcap;              // cap of scaled scores, 0: none
    const float* alibi_slopes;  // [num_heads], or null for none
    const float* sinks;         // [num_heads], or null for none; of tiles, not of decode items
    const void* pos_k;          // disentangled attention's, as are pos_q and buckets; null: none
    const void* pos_q;          // [num_buckets, num_heads, head_dim], as pos_k
    const uint8_t* k_scales;    // where k and v are E4M3 codes in pages, as PagedAttentionParams'
    const uint8_t* v_scales;    // both or neither
    const int32_t* buckets;     // [2 * relative_bias_span - 1], or null: no disentangled attention

    int32_t num_queries(int64_t sequence) const {
        return cu_seqlens[sequence + 1] - cu_seqlens[sequence];
    }
    int32_t num_keys(int64_t sequence) const {
        if (cu_pages != nullptr) {
            return static_cast<int32_t>(cu_pages[sequence + 1] - cu_pages[sequence]);
        }
        return kv_seqlens == nullptr ? num_queries(sequence) : kv_seqlens[sequence];
    }
};

// A run of query rows of one head of one sequence: the piece of work that one thread takes.
struct AttentionItem {
    int32_t sequence;
    int32_t head;
    int32_t first_query;  // within the sequence
    int32_t num_queries;  // 1..kGroupQueries
};

// Query rows that share one packed copy of a key block.  At 256 the packing costs 2 % of the two
// products; the packed queries and the f32 output of a group stay in a 1 MiB L2 up to head_dim 128.
constexpr int32_t kGroupQueries = 256;

// Keys between two rescalings of the online softmax.  256 keys x 32 queries of f32 scores are
// 32 KiB, which fits a 48 KiB L1.  The value is part of the result's last bits, so it is one
// constant for every length, thread count and batch.
constexpr int32_t kKeyBlock = 256;

// Query rows that are in work at once, at most (two vectors of the widest instruction set).
constexpr int32_t kMaxTileQueries = 32;

// One thread's scratch, in 32-bit words; the same for every instruction set, so that a workspace
// serves them all.  Rows are rounded up to whole vectors of 16 words.  Anonymous, so that no copy
// of its functions is shared between files of different instruction sets.
namespace {
struct AttentionScratch {
    int64_t row_words;
    explicit AttentionScratch(int32_t head_dim) : row_words((head_dim + 15) / 16 * 16) {}
    int64_t scores_words() const { return int64_t{kKeyBlock} * kMaxTileQueries; }
    int64_t keys_words() const { return kKeyBlock * row_words; }
    int64_t queries_words() const { return kGroupQueries * row_words; }
    // Scores, keys, values, queries, output, and 3 words a query row.
    int64_t own_words() const {
        return scores_words() + 2 * keys_words() + 2 * queries_words() + 3 * kGroupQueries;
    }
    int64_t words() const { return own_words() + 2 * keys_words(); }  // rows restored from codes
};

// Keys whose products with the buckets' queries are made at a time: fewer repeat the packing of the
// buckets more often, more have more distances, and so buckets, a key.
constexpr int32_t kPositionKeys = 32;

// A thread's further scratch for disentangled attention, in 32-bit words.
struct PositionScratch {
    static constexpr int64_t kMaxRun = kKeyBlock + kMaxTileQueries;  // buckets of a tile and block
    float* content_scores;                                           // [bucket][query lane]
    float* rows;                                                     // packed rows of pos_k
    float* lanes;            // a tile of rows of pos_q, as lanes
    float* position_scores;  // [bucket lane / tile][key][bucket lane % tile]

    PositionScratch(int32_t head_dim, float* scratch) {
        const int64_t row_words = AttentionScratch(head_dim).row_words;
        content_scores = scratch;
        rows = content_scores + kMaxRun * kMaxTileQueries;
        lanes = rows + kMaxRun * row_words;
        position_scores = lanes + kMaxTileQueries * row_words;
    }
    static int64_t words(int32_t head_dim) {
        const int64_t row_words = AttentionScratch(head_dim).row_words;
        return kMaxRun * kMaxTileQueries + (kMaxRun + kMaxTileQueries) * row_words +
               (2 * kMaxTileQueries + kPositionKeys) * kPositionKeys;
    }
};
}  // namespace

// A run of keys, and some of the heads of k and v, for the one query row that a sequence has in a
// decode step.
struct DecodeItem {
    int32_t sequence;
    int32_t first_kv_head;
    int32_t num_kv_heads;  // they have kGroupQueries query heads at most
    int32_t first_key;
    int32_t num_keys;
    float* partials;  // [num_heads] of decode_partial_words(), or null where these are all its keys
};

// Keys of one decode item, on a grid that starts at key 0.  Long pasts are split into such runs
// whatever the batch and the threads are, so that the order of summation is the sequence's own.
// 512 keys are 5 to 20 us of reading.
constexpr int32_t kDecodeKeys = 512;

// A query head's maximum, sum, and from word 16 on the sum of weighted values.
inline int64_t decode_partial_words(int32_t head_dim) { return 16 + (head_dim + 15) / 16 * 16; }

// The kernels of an instruction set; null where it has none for the dtype.  `scratch` holds
// AttentionScratch(head_dim).words() words.
struct AttentionKernels {
    void (*attend)(const AttentionInput& in, const AttentionItem& item, float* scratch);
    void (*decode)(const AttentionInput& in, const DecodeItem& item, float* scratch);
    // Query heads from first_head on, from the partial results of all runs: [num_runs, num_heads].
    void (*merge)(const AttentionInput& in, int32_t sequence, int32_t first_head, int32_t num_heads,
                  const float* partials, int32_t num_runs, float* scratch);
};

// All but the portable ones are built for their own kind of processor only.
AttentionKernels attention_portable(DType dtype);
AttentionKernels attention_avx2(DType dtype);
AttentionKernels attention_avx512(DType dtype);
AttentionKernels attention_avx512bf16(DType dtype);
AttentionKernels attention_neon(DType dtype);
AttentionKernels attention_neonbf16(DType dtype);

// Those of `isa`, or of the best set below it that has some for this dtype.
AttentionKernels choose_attention(Isa isa, DType dtype);

}  // namespace bytetx::cpu
