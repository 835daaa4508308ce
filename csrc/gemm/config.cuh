// A tiling with the type of its operands, and what every GEMM gets.
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

#include "gemm/tilings.cuh"

namespace bytetx::gemm {

// Rows of b that are permuted among themselves on their way to shared memory: row 8 * i + 2 * t + e
// there is row 8 * t + 2 * i + e of b. wgmma gives thread t of a quad columns 8 * i + 2 * t + {0,
// 1} of its result; so they are eight neighbours of d, and 16 bytes to load or store.
constexpr int kPermutedRows = 32;

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Two E4M3, which tensor maps, rings and fetches take for one element of 16 bits.
struct alignas(2) Fp8Pair {
    uint8_t low, high;
};

// T: half_t, bfloat16_t or float_e4m3_t, what the tensor cores multiply.
template <typename T, typename Tiling_>
struct Config : Tiling_ {
    using Tile = Tiling_;
    using Element = std::conditional_t<sizeof(T) == 1, Fp8Pair, T>;
    static constexpr int kFeatures = kBlockK * kElementBytes / sizeof(T);  // of a stage
    static constexpr int kWarpgroupM = 64 * Tile::kRowBlocks;
    static constexpr int kTileM = kWarpgroupM * Tile::kTogether;
    static constexpr int kAElements = kTileM * kBlockK;
    static constexpr int kBElements = Tile::kTileN * kBlockK;
    static constexpr int kStageBytes = (kAElements + kBElements) * kElementBytes;
    using Atom = cute::GMMA::Layout_K_SW128_Atom<T>;
    using LayoutA = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kFeatures>>{}));
    using LayoutB = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<Tile::kTileN>, cute::Int<kFeatures>>{}));
    using Mma = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<
            T, T, float, cute::Shape<cute::_64, cute::Int<Tile::kTileN>, cute::Int<kFeatures>>>()));
    using Accumulators = decltype(cute::partition_fragment_C(
        Mma{}, cute::Shape<cute::Int<kWarpgroupM>, cute::Int<Tile::kTileN>>{}));

    // What the matrix unit takes a stage's rows for.
    static __device__ __forceinline__ T* operand(Element* rows) {
        return reinterpret_cast<T*>(rows);
    }
};

// Feature blocks [begin, end) of one CTA.
struct Share {
    int begin, end;
};

// What every GEMM has: d = a b^T, and how many tiles. Tensor maps first: they must be 64-byte
// aligned.
struct Problem {
    CUtensorMap a;  // {k, m}
    CUtensorMap b;  // {k, 2, 4, 4, n / 32}: rows in the order of kPermutedRows
    void* d;        // [m, n]; gated: [m, n / 2]
    int m, n;
    int num_k_blocks;
    int tiles_m, tiles_n;  // of clusters
};

}  // namespace bytetx::gemm
