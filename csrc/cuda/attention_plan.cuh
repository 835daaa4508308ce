// Where the parts of an attention plan lie in its buffer: attention_plan.cu writes, attention
// reads.
//
//   int  used_tiles, Counters, 1 unused
//   int4 tiles[max_tiles]     {first row, rows, first key, one past the last key}, in running order
//   int4 unsorted[max_tiles]  in the order of rows, where the two differ
//   int2 row_bounds[padded]   first row and one past the last row of each row's sequence
//
// In a tree, where sequences continue others, bytetx/ops/attention_plan.py makes the plan:
//
//   int  used_tiles, Counters, 1 unused
//   int4 tiles[num_tiles]
//   int2 ancestors[num_tiles][kMaxAncestors]  rows of those that all of the tile's sequences
//                                             continue, the first one first; {0, 0} behind the last
//   int2 row_bounds[padded]
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace bytetx::attention {

// Features above which no warpgroups share a tile: their sums would fill all registers.
constexpr int kMaxSharedDim = 128;

// Rows of a tile that several warpgroups share.
constexpr int pipeline_rows(int head_dim) { return head_dim > 64 ? 128 : 192; }

// Two neighbouring tiles hold more than tile_rows rows between them, else they were one, unless
// every sequence opens a tile; and every sequence opens at most one tile that is not full.
inline int64_t max_tiles(int64_t batch_size, int64_t total_tokens, int64_t tile_rows,
                         bool batch_invariant) {
    const int64_t full = total_tokens / tile_rows;
    if (batch_invariant) return full + batch_size + 1;
    return std::min(2 * full + 1, full + batch_size) + 1;
}

constexpr int kMaxAncestors = 4;  // as in bytetx/sequence_tree.py

// Tiles are read whole: from an even row on, up to tile_rows + 2 of them.
inline int64_t padded_rows(int64_t total_tokens, int64_t tile_rows) {
    return total_tokens + tile_rows + 2;
}

// How far the CTAs of a persistent kernel have come; all zero when none runs. So one plan serves
// one call at a time.
struct Counters {
    int next_item, done_ctas;
};

struct PlanView {
    int* used_tiles;
    Counters* counters;
    int4* tiles;
    int4* unsorted;
    int2* ancestors;
    int2* row_bounds;
};

inline PlanView view_plan(int32_t* plan, int64_t num_tiles) {
    auto* tiles = reinterpret_cast<int4*>(plan) + 1;
    return {plan,    reinterpret_cast<Counters*>(plan + 1),         tiles, tiles + num_tiles,
            nullptr, reinterpret_cast<int2*>(tiles + 2 * num_tiles)};
}

inline PlanView view_tree_plan(int32_t* plan, int64_t num_tiles) {
    auto* tiles = reinterpret_cast<int4*>(plan) + 1;
    auto* ancestors = reinterpret_cast<int2*>(tiles + num_tiles);
    return {plan,      reinterpret_cast<Counters*>(plan + 1), tiles, nullptr,
            ancestors, ancestors + num_tiles * kMaxAncestors};
}

}  // namespace bytetx::attention
