// A tiling with the type of its operands, and what every GEMM gets.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/wgmma.cuh"
#include "gemm/tilings.cuh"

namespace bytetx::gemm {

// Rows of b that are permuted among themselves on their way to shared memory: row 8 * i + 2 * t + e
// there is row 8 * t + 2 * i + e of b. wgmma gives thread t of a quad columns 8 * i + 2 * t + {0,
// 1} of its result; so they are eight neighbours of d, and 16 bytes to load or store.
constexpr int kPermutedRows = 32;

// Two E4M3, which tensor maps, rings and fetches take for one element of 16 bits.
struct alignas(2) Fp8Pair {
    uint8_t low, high;
};

// T: Half, BFloat16 or E4m3, what the tensor cores multiply.
template <typename T, typename Tiling_>
struct Config : Tiling_ {
    using Tile = Tiling_;
    using Factor = T;
    using Element = std::conditional_t<sizeof(T) == 1, Fp8Pair, T>;
    static constexpr int kWarpgroupM = 64 * Tile::kRowBlocks;
    static constexpr int kTileM = kWarpgroupM * Tile::kTogether;
    static constexpr int kAElements = kTileM * kBlockK;
    static constexpr int kBElements = Tile::kTileN * kBlockK;
    static constexpr int kStageBytes = (kAElements + kBElements) * kElementBytes;
    using Accumulators = Sums<Tile::kRowBlocks * Tile::kTileN / 2>;
};

// Feature blocks [begin, end) of one CTA.
struct Share {
    int begin, end;
};

// Parameters of every GEMM: d = a b^T, and how many tiles. Tensor maps first: they must be 64-byte
// aligned.
struct Problem {
    CUtensorMap a;  // {k, m}
    CUtensorMap b;  // {k, 2, 4, 4, n / 32}: rows in the order of kPermutedRows
    void* d;        // [m, n]; gated: [m, n / 2]
    int m, n;
    int num_k_blocks;
    int tiles_m, tiles_n;  // tiles of whole clusters
};

}  // namespace bytetx::gemm
