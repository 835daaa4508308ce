// Parameters of the kernels of packed attention, and the types of a tiling.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/launch.cuh"
#include "cuda/attention_mma.cuh"
#include "cuda/attention_plan.cuh"

namespace bytetx::attention {

// Parameters of a kernel. TMA maps first: they must be 64-byte aligned.
struct Params {
    CUtensorMap q;  // {head_dim, num_heads, total_tokens}
    CUtensorMap k;
    CUtensorMap v;
    const void* k_rows;  // for recompute_row alone
    const void* v_rows;
    const void* q_rows;
    void* out;
    const int2* row_bounds;  // [num_tiles * rows of a tile] its sequence; {total, total} past it
    const int4* tiles;       // [num_tiles] {first row, rows, first key, one past the last key}
    const int* used_tiles;   // how many of them hold rows
    const int2* ancestors;   // [num_tiles, kMaxAncestors] rows of a tree's; null: no tree
    Counters* counters;      // zero before and after every kernel
    const float* relative_bias;                        // [num_heads, 2 * span - 1], or null
    const int* bias_positions;                         // [total_tokens], or null
    int64_t q_stride, k_stride, v_stride, out_stride;  // elements
    int total_tokens;
    int num_tiles;
    int num_heads;
    int group;  // query heads per key head
    int head_dim;
    int window;  // a row sees window - 1 keys before its own, and after it unless causal; 0: all
    int bias_span;
    bool causal;
    float softmax_scale;
    float power_scale;  // the same for powers of two
    float softcap;      // 0: none
    Softcap capped;     // to powers of two
};

template <typename T, int kHeadDim, typename Tiling>
struct TileTypes : TileShapes<T, kHeadDim, Tiling::kBlockN, Tiling::kGroupsKeys> {
    static constexpr int kBlockN = Tiling::kBlockN;
    // A last step of that many keys or fewer costs half: whole steps of P V.
    static constexpr int kTail = kBlockN / 2 / kChunkColumns * kChunkColumns;
    static constexpr int kStages = Tiling::kStages;
    static constexpr int kNumWarpgroups = Tiling::kNumWarpgroups;
    static constexpr int kQStages = Tiling::kQStages;
    // As launched, three warpgroups have 3 * 168 registers and four have 4 * 128: the sums after
    // the move must not exceed that, or it never ends.
    static constexpr int kConsumerRegisters = Tiling::kConsumerRegisters;
    static constexpr int kProducerRegisters = kNumWarpgroups == 2         ? 40
                                              : kConsumerRegisters <= 152 ? 56
                                                                          : 32;
    // Between two steps of a warpgroup, where the warpgroups take steps round-robin (split_kernel).
    static constexpr int kSkippedKeys =
        kConsumerRegisters == 0 ? (kNumWarpgroups - 1) * kBlockN : 0;
    static constexpr bool kChangesScores = Tiling::kChangesScores;  // by a softcap, a bias
    static constexpr bool kQInRegisters = Tiling::kQInRegisters;
    static constexpr bool kHasTree = Tiling::kHasTree;  // tiles see ancestors of their sequences
    static constexpr int kKvBytes = kBlockN * kHeadDim * kElementBytes;
};

// Copies kRows token rows of one head to a swizzled tile, box by box; rows and columns that the
// tensor does not have arrive as zeros and count as bytes.
template <typename C, int kRows>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, uint64_t* barrier,
                                          typename C::Element* tile, int head, int row) {
#pragma unroll
    for (int box = 0; box < C::kDim / C::kBoxColumns; ++box) {
        load_box(&map, barrier, L2Policy::evict_normal, tile + box * kRows * C::kBoxColumns,
                 box * C::kBoxColumns, head, row);
    }
}

}  // namespace bytetx::attention
