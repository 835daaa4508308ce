// How GEMMs are cut: the kinds of tilings, and the list of those that are compiled, each in a file
// of its own or with its like.
#pragma once

namespace bytetx::gemm {

constexpr int kWarpgroupThreads = 128;
constexpr int kBlockK = 64;  // elements of a stage's row: one swizzled row of 128 bytes
constexpr int kElementBytes = 2;
constexpr int kMostSmemBytes = 227 * 1024;  // shared memory of one CTA

template <typename C>
struct StaticStages;
template <typename C>
struct LaunchStages;  // gemm/ring.cuh has both

// A tiling of the persistent kernel: two warpgroups take tiles in turn (ping-pong).
// 64 * kRowBlocks * kTileN / 128 registers of a thread hold accumulators.
template <int kRowBlocks_, int kTileN_, int kStages_, int kClusterCtas_>
struct Tiling {
    static constexpr int kRowBlocks = kRowBlocks_;  // wgmmas of 64 rows that a warpgroup issues
    static constexpr int kTileN = kTileN_;
    static constexpr int kStages = kStages_;
    static constexpr int kClusterCtas = kClusterCtas_;  // that share columns, and so b
    static constexpr int kConsumers = 2;                // that take tiles in turn
    static constexpr int kTogether = 1;                 // warpgroups that share a tile's rows
    static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kCtasOfSm = 1;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static constexpr bool kIsForSmallM = false;
    template <typename C>
    using Stages = StaticStages<C>;
};

// A tiling for small m: one tile a cluster, whose CTAs split k; a warp fetches. kStages: at most,
// where the launch says how many.
template <int kTogether_, int kRowBlocks_, int kTileN_, int kStages_ = 16>
struct SmallMTiling {
    static constexpr int kTogether = kTogether_;
    static constexpr int kRowBlocks = kRowBlocks_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kStages = kStages_;
    static constexpr int kClusterCtas = 1;  // that share columns; those that share k come at launch
    static constexpr int kConsumers = 1;
    static constexpr int kConsumerThreads = kTogether * kWarpgroupThreads;
    static constexpr int kThreads = kConsumerThreads + 32;
    static constexpr int kCtasOfSm = 0;           // as many as the launch leaves room for
    static constexpr int kConsumerRegisters = 0;  // all threads keep those of the launch
    static constexpr int kProducerRegisters = 0;
    static constexpr bool kIsForSmallM = true;
    template <typename C>
    using Stages = LaunchStages<C>;
};

// The same without split-k: the two CTAs of a cluster work on tiles below one another and send each
// other their half of b. With as many CTAs as SMs it is L2 that bounds the main loop, and pairs
// read a quarter to a third less from it.
template <int kTogether, int kRowBlocks, int kTileN, int kStages = 16>
struct SmallMPairTiling : SmallMTiling<kTogether, kRowBlocks, kTileN, kStages> {
    static constexpr int kClusterCtas = 2;
};

// Whole rows of d belong to a group of kParts clusters, of kClusterCtas each, that lie beside one
// another; a CTA has kTileN columns.
template <int kRowBlocks, int kTileN, int kStages, int kClusterCtas, int kParts_>
struct RowNormTiling : Tiling<kRowBlocks, kTileN, kStages, kClusterCtas> {
    static constexpr int kParts = kParts_;
    static constexpr int kGroupCtas = kClusterCtas * kParts;
    static constexpr int kColumns = kGroupCtas * kTileN;
};

// As Tiling_, with stages given up for kInputColumns columns of a tile of d's size.
template <typename Tiling_, int kInputColumns_ = Tiling_::kTileN>
struct WithTileInput : Tiling_ {
    static constexpr int kInputColumns = kInputColumns_, kRows = 64 * Tiling_::kRowBlocks;
    static constexpr int kInputBytes = kRows * kInputColumns * kElementBytes;
    static constexpr int kStageBytes = (kRows + Tiling_::kTileN) * kBlockK * kElementBytes;
    static_assert(kInputColumns % 64 == 0 && Tiling_::kTileN % kInputColumns == 0);
    static constexpr int kStages = (kMostSmemBytes - 1024 - kInputBytes) / kStageBytes;
};

// As Tiling_, for a producer warpgroup that also moves rows between GPUs.
template <typename Tiling_>
struct WithMovers : Tiling_ {
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

// A tiling whose rows of 64 are weights and whose columns are tokens, for gemm_all_reduce().
template <int kRowBlocks, int kTokens, int kStages>
struct OneShotTiling : SmallMTiling<1, kRowBlocks, kTokens, kStages> {
    template <typename C>
    using Stages = StaticStages<C>;
};

// ---- the list

// linear(), rows x columns of d; the first also of the GEMMs of comm/ for many rows.
using Tile128x192 = Tiling<2, 192, 5, 2>;
using Tile192x128 = Tiling<3, 128, 5, 2>;
using Tile128x128 = Tiling<2, 128, 7, 2>;
using Tile192x128Single = Tiling<3, 128, 5, 1>;

// The GEMMs of comm/ for many rows: a stage less leaves room for rows on their way.
using CommTile128x128 = Tiling<2, 128, 6, 2>;

// linear() with few rows.
using SmallM64x32 = SmallMTiling<1, 1, 32>;
using SmallM64x64 = SmallMTiling<1, 1, 64>;
using SmallM64x96 = SmallMTiling<1, 1, 96>;
using SmallM128x32 = SmallMTiling<2, 1, 32>;
using SmallM128x64 = SmallMTiling<2, 1, 64>;
using SmallM128x96 = SmallMTiling<2, 1, 96, 5>;
using SmallM128x128 = SmallMTiling<2, 1, 128, 4>;
using SmallM192x128 = SmallMTiling<3, 1, 128, 4>;
using SmallM64x64Pair = SmallMPairTiling<1, 1, 64>;
using SmallM128x64Pair = SmallMPairTiling<2, 1, 64>;
using SmallM128x128Pair = SmallMPairTiling<2, 1, 128>;

// fp8_linear(); with few rows SmallM64x64 and SmallM128x64.
using Fp8Tile128x128 = Tiling<2, 128, 7, 1>;
using Fp8Tile64x128 = Tiling<1, 128, 8, 1>;

// linear_norm(), by columns of a row. Short: for fewer rows.
using RowNorm384 = RowNormTiling<2, 192, 4, 2, 1>;
using RowNorm384Short = RowNormTiling<1, 192, 6, 2, 1>;
using RowNorm768 = RowNormTiling<2, 192, 4, 2, 2>;
using RowNorm1024 = RowNormTiling<2, 128, 5, 2, 4>;

// gemm_all_reduce() with few rows: tokens x features. The number of stages lets three, two or one
// CTA share an SM.
using OneShot16x64 = OneShotTiling<1, 16, 7>;
using OneShot16x128 = OneShotTiling<2, 16, 12>;
using OneShot32x64 = OneShotTiling<1, 32, 6>;
using OneShot32x128 = OneShotTiling<2, 32, 10>;
using OneShot64x64 = OneShotTiling<1, 64, 7>;
using OneShot64x128 = OneShotTiling<2, 64, 9>;
using OneShot128x128 = OneShotTiling<2, 128, 7>;
using OneShot256x64 = OneShotTiling<1, 256, 5>;

}  // namespace bytetx::gemm
