// What the attention kernels get and how their tiles lie in shared memory.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/launch.cuh"
#include "cuda/attention_plan.cuh"

namespace bytetx::attention {

constexpr int kTileRows = 64;      // rows of one wgmma
constexpr int kChunkColumns = 16;  // columns that a warp skips together: one step of P V
constexpr int kElementBytes = 2;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
// A row's running maximum is raised only when a score exceeds it by this much (in powers of two):
// weights stay at most 2^8, exact in f16 as they are at 1, and most rescales disappear.
// Source: FlashAttention-4's conditional rescaling.
constexpr float kMaxSlack = 8.0f;
constexpr float kMaxSum = 4096.0f;  // of a thread's weights of one row and step: far from f16's end
constexpr float kNoMax = -3.0e38f;  // below every score, and finite: -inf - (-inf) would be NaN

// What a kernel gets. TMA maps first: they must be 64-byte aligned.
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
    Counters* counters;      // zero before and after every kernel
    const float* relative_bias;                        // [num_heads, 2 * span - 1], or null
    const int* bias_positions;                         // [total_tokens], or null
    int64_t q_stride, k_stride, v_stride, out_stride;  // elements
    int total_tokens;
    int num_tiles;
    int num_heads;
    int group;  // query heads per key head
    int head_dim;
    int window;  // keys a row sees up to itself; 0: no limit
    int bias_span;
    bool causal;
    float softmax_scale;
    float power_scale;  // the same for powers of two
};

template <typename T, int kHeadDim, typename Tiling>
struct TileTypes {
    using Element = T;
    static constexpr int kDim = kHeadDim;
    static constexpr int kBlockN = Tiling::kBlockN;
    // A last step of that many keys or fewer costs half: whole steps of P V.
    static constexpr int kTail = kBlockN / 2 / kChunkColumns * kChunkColumns;
    static constexpr int kStages = Tiling::kStages;
    static constexpr int kNumWarpgroups = Tiling::kNumWarpgroups;
    static constexpr int kQStages = Tiling::kQStages;
    // As launched, three warpgroups have 3 * 168 registers and four have 4 * 128: the sums after
    // the move must not exceed that, or it never ends.
    static constexpr int kConsumerRegisters = Tiling::kConsumerRegisters;
    static constexpr int kProducerRegisters = kNumWarpgroups == 2 ? 40 : 32;
    // Between two steps of a warpgroup, where steps are dealt out in turn (split_kernel).
    static constexpr int kSkippedKeys =
        kConsumerRegisters == 0 ? (kNumWarpgroups - 1) * kBlockN : 0;
    static constexpr bool kHasBias = Tiling::kHasBias;
    // Columns of one TMA box: a swizzled row is at most 128 bytes.
    static constexpr int kBoxColumns = kHeadDim % 64 == 0 ? 64 : 32;
    static constexpr int kQElements = kTileRows * kHeadDim;
    static constexpr int kKvElements = kBlockN * kHeadDim;
    static constexpr int kKvBytes = kKvElements * kElementBytes;
    using Atom = std::conditional_t<kBoxColumns == 64, cute::GMMA::Layout_K_SW128_Atom<T>,
                                    cute::GMMA::Layout_K_SW64_Atom<T>>;
    using LayoutQ = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kTileRows>, cute::Int<kHeadDim>>{}));
    using LayoutK = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>{}));
    using LayoutVt = decltype(cute::composition(
        LayoutK{}, cute::make_layout(cute::Shape<cute::Int<kHeadDim>, cute::Int<kBlockN>>{},
                                     cute::Stride<cute::Int<kBlockN>, cute::_1>{})));
    template <int kN>
    using MmaQk = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kHeadDim>>>()));
    template <int kN>
    using MmaPv = decltype(cute::make_tiled_mma(
        cute::GMMA::rs_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kHeadDim>, cute::Int<kN>>,
                                   cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
};

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Copies kRows token rows of one head to a swizzled tile, box by box; rows and columns that the
// tensor does not have arrive as zeros and count as bytes.
template <typename C, int kRows>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, uint64_t* barrier,
                                          typename C::Element* tile, int head, int row) {
#pragma unroll
    for (int box = 0; box < C::kDim / C::kBoxColumns; ++box) {
        cute::SM90_TMA_LOAD_3D::copy(
            &map, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
            tile + box * kRows * C::kBoxColumns, box * C::kBoxColumns, head, row);
    }
}

}  // namespace bytetx::attention
