// What the GEMM kernels share: operands, the shape of a tile, shared memory, rings, the schedule.
//
//   d[m, n] = act(a[m, k] b[n, k]^T + bias[n] + residual[m, n])             f32 accumulation
//
// A tile of d belongs to one warpgroup. Where rows are many, two warpgroups take tiles in turn, so
// that one's loads of residuals, activation and stores run under the other's products, and the CTAs
// of a cluster work on tiles below one another: each fetches a part of b and sends it to all.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>  // before CUTLASS, which includes it inside its namespace
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/ring.cuh"

namespace bytetx::gemm {

constexpr int kWarpgroupThreads = 128;
constexpr int kBlockK = 64;  // features of a stage: one swizzled row of 128 bytes
constexpr int kElementBytes = 2;
constexpr int kMostSmemBytes = 227 * 1024;  // of a CTA
// Rows of b that are permuted among themselves on their way to shared memory: row 8 * i + 2 * t + e
// there is row 8 * t + 2 * i + e of b. wgmma gives thread t of a quad columns 8 * i + 2 * t + {0,
// 1} of its result; so they are eight neighbours of d, and 16 bytes to load or store.
constexpr int kPermutedRows = 32;

// What becomes of a sum. linear: none, relu. erf: exact GELU. sigmoid: tanh GELU, SiLU, tanh.
enum class Epilogue : int { linear = 0, erf = 1, sigmoid = 2 };

// linear is max(x, floor); sigmoid is s * (times_x * x + times_one) + offset with
// s = 1 / (1 + 2^-(x * (scale + scale_cubed * x * x))).
struct ActivationConstants {
    float floor;
    float scale, scale_cubed;
    float times_x, times_one, offset;
};

// The raster order of a persistent kernel's tiles: bands of several rows of tiles, within a band
// along m first. The rows of a of a band stay in L2 while the columns of b pass once. A band of one
// row goes along n and reads its rows of a once.
struct RasterOrder {
    int first;  // first row of cluster tiles; the order wraps around after the last row
    int rows;   // rows of cluster tiles in a band
};

// What a kernel gets. Tensor maps first: they must be 64-byte aligned.
struct Params {
    CUtensorMap a;         // {k, m}
    CUtensorMap b;         // {k, 2, 4, 4, n / 32}: rows in the order of kPermutedRows
    const void* bias;      // [n], or null for none
    const void* residual;  // as d, or null for none; not where d is gated
    void* d;               // [m, n]; gated: [m, n / 2]
    int m, n;
    int num_k_blocks;
    int tiles_m, tiles_n;  // of clusters
    ActivationConstants activation;
    RasterOrder raster;
};

// A tiling of a GEMM. 64 * kRowBlocks * kTileN / 128 registers of a thread hold accumulators.
template <int kRowBlocks_, int kTileN_, int kStages_, int kClusterCtas_>
struct Tiling {
    static constexpr int kRowBlocks = kRowBlocks_;  // wgmmas of 64 rows that a warpgroup issues
    static constexpr int kTileN = kTileN_;
    static constexpr int kStages = kStages_;
    static constexpr int kClusterCtas = kClusterCtas_;  // that share columns, and so b
    static constexpr int kConsumers = 2;
    static constexpr int kTogether = 1;  // warpgroups that share a tile's rows
    static constexpr bool kIsForSmallM = false;
};

template <typename T, typename Tiling_>
struct Config : Tiling_ {
    using Element = T;
    using Tile = Tiling_;
    static constexpr int kThreads = (Tile::kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static constexpr int kWarpgroupM = 64 * Tile::kRowBlocks;
    static constexpr int kTileM = kWarpgroupM * Tile::kTogether;
    static constexpr int kAElements = kTileM * kBlockK;
    static constexpr int kBElements = Tile::kTileN * kBlockK;
    static constexpr int kStageBytes = (kAElements + kBElements) * kElementBytes;
    using Atom = cute::GMMA::Layout_K_SW128_Atom<T>;
    using LayoutA = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kBlockK>>{}));
    using LayoutB = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<Tile::kTileN>, cute::Int<kBlockK>>{}));
    using Mma = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<
            T, T, float, cute::Shape<cute::_64, cute::Int<Tile::kTileN>, cute::Int<kBlockK>>>()));
    using Accumulators = decltype(cute::partition_fragment_C(
        Mma{}, cute::Shape<cute::Int<kWarpgroupM>, cute::Int<Tile::kTileN>>{}));

    // What the matrix unit takes a stage's rows for.
    static __device__ __forceinline__ T* operand(T* rows) { return rows; }
};

template <typename C>
struct Smem {
    alignas(1024) typename C::Element a[C::kStages][C::kAElements];
    alignas(1024) typename C::Element b[C::kStages][C::kBElements];
    uint64_t full[C::kStages], empty[C::kStages];
    uint64_t order[C::kConsumers];  // the other warpgroup has taken all its stages
};

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Where a CTA of a cluster stands, and the tiles that the cluster works on.
template <typename C>
struct Schedule {
    int rank = C::kClusterCtas > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
    int cluster = static_cast<int>(blockIdx.x) / C::kClusterCtas;
    int num_clusters = static_cast<int>(gridDim.x) / C::kClusterCtas;

    struct Place {
        int m, n;
    };

    __device__ __forceinline__ Place place(const Params& p, int tile) const {
        const int whole = p.raster.rows * p.tiles_n;
        const int band = tile / whole, within = tile % whole;
        const int height = min(p.raster.rows, p.tiles_m - band * p.raster.rows);
        int row = band * p.raster.rows + within % height + p.raster.first;
        if (row >= p.tiles_m) row -= p.tiles_m;
        return {row, within / height};
    }
    __device__ __forceinline__ int tile_m(const Params& p, int tile) const {
        return (place(p, tile).m * C::kClusterCtas + rank) * C::kTileM;
    }
    __device__ __forceinline__ int tile_n(const Params& p, int tile) const {
        return place(p, tile).n * C::kTileN;
    }
};

}  // namespace bytetx::gemm
