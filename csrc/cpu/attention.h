// What the attention launcher (attention.cpp) and the kernel of each instruction set share.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx::cpu {

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
    int64_t words() const {  // scores, keys, values, queries, output, and 3 words a query row
        return scores_words() + 2 * keys_words() + 2 * queries_words() + 3 * kGroupQueries;
    }
};
}  // namespace

// Computes one item; `scratch` holds AttentionScratch(head_dim).words() words.
using AttentionKernel = void (*)(const VarlenAttentionParams& p, const AttentionItem& item,
                                 float* scratch);

// The kernel of an instruction set, or nullptr where it has none for the dtype.  All but the
// portable one are built for x86-64 only.
AttentionKernel attention_portable(DType dtype);
AttentionKernel attention_avx2(DType dtype);
AttentionKernel attention_avx512(DType dtype);
AttentionKernel attention_avx512bf16(DType dtype);

}  // namespace bytetx::cpu
