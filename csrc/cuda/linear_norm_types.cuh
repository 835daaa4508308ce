// How a GEMM whose rows are normalized before they are stored is cut, and what its CTAs share.
#pragma once

#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

// Whole rows belong to a group of kParts clusters, of kClusterCtas each; a CTA has kTileN columns.
template <int kRowBlocks, int kTileN, int kStages, int kClusterCtas, int kParts_>
struct RowNormTiling : Tiling<kRowBlocks, kTileN, kStages, kClusterCtas> {
    static constexpr int kParts = kParts_;
    static constexpr int kGroupCtas = kClusterCtas * kParts;
    static constexpr int kColumns = kGroupCtas * kTileN;
};

// In workspace where nothing has arrived: no NaN that arithmetic gives.
constexpr uint64_t kAbsent = ~uint64_t{0};
constexpr int kMostSpins = 1 << 26;  // some ten seconds; then a peer is gone

struct RowNormParams : Params {
    CUtensorMap residual_map;  // {32, m, n / 32}
    const void* weight;        // [n]
    const void* shift;         // [n]
    uint64_t* workspace;       // [tiles_m, kParts (to), kParts (from), kClusterCtas, 128]
    float eps;
};

// Of columns of a row: their mean, and the sum of squares around it.
struct Moments {
    float mean, squares;
};

// Two places for moments: a peer that has this CTA's moments of one tile may send those of the next
// before this CTA has read those of the first, but not those of the one after.
template <typename C>
struct RowNormSmem : Smem<C> {
    // [kTileN / 32][kTileM][32]: what a quarter of a warp reads lies side by side.
    alignas(128) typename C::Element residual[C::kTileM * C::kTileN];
    alignas(16) float bias[C::kTileN], weight[C::kTileN], shift[C::kTileN];
    Moments moments[C::kConsumers][2][C::kClusterCtas][kWarpgroupThreads];
    uint64_t arrived[C::kConsumers][2];
    uint64_t residual_full[C::kConsumers], residual_empty;
};

}  // namespace bytetx::gemm
