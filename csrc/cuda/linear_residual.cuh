// Residuals by TMA: a tile's lie in shared memory before its products end, and are added behind
// them.
//
// Loaded by the threads that have the sums, they cost 7 000 to 9 000 cycles a tile: misses of 48 KB
// do not fit the L1 that such a kernel leaves. There is room for one tile's: those of the next are
// under way as soon as one warpgroup has added its own, while the other multiplies.
#pragma once

#include "cuda/linear_kernel.cuh"

namespace bytetx::gemm {

// As Tiling_, with stages given up for residuals.
template <typename Tiling_>
struct WithResidual : Tiling_ {
    static constexpr int kColumns = Tiling_::kTileN, kRows = 64 * Tiling_::kRowBlocks;
    static constexpr int kResidualBytes = kRows * kColumns * kElementBytes;
    static constexpr int kStageBytes = (kRows + kColumns) * kBlockK * kElementBytes;
    static constexpr int kStages = (kMostSmemBytes - 1024 - kResidualBytes) / kStageBytes;
};

template <typename C>
struct ResidualSmem : Smem<C> {
    // [kTileN / 32][kTileM][32]: what a quarter of a warp reads lies side by side.
    alignas(128) typename C::Element residual[C::kTileM * C::kTileN];
    uint64_t residual_full[C::kConsumers], residual_empty;
};

struct ResidualParams : Params {
    CUtensorMap residual_map;  // {32, m, n / 32}
};

template <typename C>
__device__ __forceinline__ void init_residual_barriers(ResidualSmem<C>& s) {
    for (uint64_t& barrier : s.residual_full) FullBarrier::init(&barrier, 1);
    EmptyBarrier::init(&s.residual_empty, 4);
}

// One thread: the residuals of the CTA's `turn`-th tile, at row m and column n.
template <typename C>
__device__ __forceinline__ void fetch_residual(const CUtensorMap& map, ResidualSmem<C>& s, int turn,
                                               int m, int n) {
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    EmptyBarrier::wait(&s.residual_empty, turn % 2 ^ 1);  // pairs with add_residual()
    uint64_t* full = &s.residual_full[turn % C::kConsumers];
    FullBarrier::arrive_and_expect_tx(full, sizeof(s.residual));
    cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, s.residual, 0, m, n / kPermutedRows);
}

// One thread beside the producer's: every tile's, as soon as those before have been read.
template <typename C, typename At>
__device__ __forceinline__ void fetch_residuals(const Params& p, const CUtensorMap& map,
                                                ResidualSmem<C>& s, const At& at) {
    int turn = 0;
    for (int tile = at.cluster; tile < p.tiles_m * p.tiles_n; tile += at.num_clusters, ++turn) {
        fetch_residual(map, s, turn, at.tile_m(p, tile), at.tile_n(p, tile));
    }
}

// The producer's thread: a tile's residuals behind its first stages, which are needed sooner. When
// these are under way the tile before has been multiplied, and its residuals are about to be added.
template <typename C, typename At>
__device__ __forceinline__ void produce_with_residuals(const ResidualParams& p, ResidualSmem<C>& s,
                                                       const At& at) {
    const int behind = min(C::kStages, p.num_k_blocks) - 1;
    int turn = 0;
    produce<C>(p, s, at, [&](int tile, int block) {
        if (block != behind) return;
        fetch_residual(p.residual_map, s, turn++, at.tile_m(p, tile), at.tile_n(p, tile));
    });
}

// round: of the tiles that this warpgroup works on.
template <typename C, typename Sums>
__device__ __forceinline__ void add_residual(ResidualSmem<C>& s, Sums& sums, int round) {
    using T = typename C::Element;
    using Edge = TileEdge<C, Epilogue::linear, false>;
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    const int row = thread / 32 * 16 + thread % 32 / 4;  // the thread's first, of the tile
    FullBarrier::wait(&s.residual_full[group], round % 2);  // pairs with fetch_residuals()
    const T* words = s.residual + row * kPermutedRows + thread % 4 * 8;
#pragma unroll
    for (int i = 0; i < Edge::kRowsOfThread; ++i) {
        const int row_offset = i / 2 * 64 + i % 2 * 8;
#pragma unroll
        for (int q = 0; q < Edge::kColumnGroups; ++q) {
            const uint4 eight = *reinterpret_cast<const uint4*>(
                words + (q * C::kTileM + row_offset) * kPermutedRows);
            Edge::add(sums, i, q, eight);
        }
    }
    __syncwarp();
    if (thread % 32 == 0) EmptyBarrier::arrive(&s.residual_empty);
}

// One warpgroup's tile, the `round`-th that it works on.
template <typename C>
struct ResidualEdge : TileEdge<C, Epilogue::linear, false> {
    using Base = TileEdge<C, Epilogue::linear, false>;
    ResidualSmem<C>& s;
    int round;

    template <typename Sums>
    __device__ __forceinline__ void store(Sums& sums) const {
        add_residual(s, sums, round);
        Base::store(sums);
    }
};

// As gemm_kernel, for sums that a residual is added to.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_residual_kernel(const __grid_constant__ ResidualParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<ResidualSmem<C>*>(smem);
    const Schedule<C> at;
    if (threadIdx.x == 0) init_residual_barriers(s);
    init_barriers<C>(s);
    release_next_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % kWarpgroupThreads == 0) produce_with_residuals(p, s, at);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        wait_for_prior_kernel();
        int round = 0;
        consume<C>(p, s, at, [&](int m, int n) {
            return ResidualEdge<C>{{p, m, n}, s, round++};
        });
    }
    __syncwarp();
    if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    }
}

}  // namespace bytetx::gemm
