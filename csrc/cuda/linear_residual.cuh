// Residuals by TMA: a tile's lie in shared memory before its products end, and are added behind
// them.
//
// Loaded by the threads that have the sums, they cost 7 000 to 9 000 cycles a tile: misses of 48 KB
// do not fit the L1 that such a kernel leaves. There is room for one tile's: those of the next are
// under way as soon as one warpgroup has added its own, while the other multiplies. So are those of
// the next array, where a kernel adds several: P says how many, and fetches them.
#pragma once

#include "cuda/linear_kernel.cuh"

namespace bytetx::gemm {

// As Tiling_, with stages given up for residuals.
template <typename Tiling_>
struct WithResidual : Tiling_ {
    static constexpr int kColumns = Tiling_::kTileN, kRows = 64 * Tiling_::kRowBlocks;
    static constexpr int kResidualBytes = kRows * kColumns * kElementBytes;
    static constexpr int kStageBytes = (kRows + kColumns) * kBlockK * kElementBytes;
    static_assert(kColumns % 64 == 0);
    static constexpr int kStages = (kMostSmemBytes - 1024 - kResidualBytes) / kStageBytes;
};

template <typename C>
struct ResidualSmem : Smem<C> {
    // [kTileN / 64][kTileM][64], swizzled. TMA takes as long for a row of 64 bytes as of 128.
    alignas(1024) typename C::Element residual[C::kTileM * C::kTileN];
    uint64_t residual_full[C::kConsumers], residual_empty;
    uint64_t has_begun;  // the first stages are under way
};

constexpr int kResidualColumns = 64;  // of a box

struct ResidualParams : Params {
    CUtensorMap residual_map;  // {n, m}

    static __device__ __forceinline__ int num_residuals() { return 1; }

    // A box of residual `index`; one thread.
    template <typename T>
    __device__ __forceinline__ void fetch_residual(int index, uint64_t* full, T* to, int column,
                                                   int row) const {
        const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
        cute::SM90_TMA_LOAD_2D::copy(&residual_map, full, hint, to, column, row);
    }
};

template <typename C>
__device__ __forceinline__ void init_residual_barriers(ResidualSmem<C>& s) {
    for (uint64_t& barrier : s.residual_full) FullBarrier::init(&barrier, 1);
    EmptyBarrier::init(&s.residual_empty, 4);
    EmptyBarrier::init(&s.has_begun, 1);
}

// One thread beside the producer's: a tile's residuals, each as soon as those before have been
// read.
template <typename C, typename P, typename At>
__device__ __forceinline__ void fetch_residuals(const P& p, ResidualSmem<C>& s, const At& at) {
    static_assert(C::kConsumers == 2);
    int phase = 1, group = 0;
    for (int tile = at.cluster; tile < p.tiles_m * p.tiles_n; tile += at.num_clusters, group ^= 1) {
        const int column = at.tile_n(p, tile), row = at.tile_m(p, tile);
        uint64_t* full = &s.residual_full[group];
#pragma unroll 1
        for (int index = 0; index < p.num_residuals(); ++index, phase ^= 1) {
            EmptyBarrier::wait(&s.residual_empty, phase);  // pairs with add_residual()
            FullBarrier::arrive_and_expect_tx(full, sizeof(s.residual));
#pragma unroll
            for (int i = 0; i < C::kTileN / kResidualColumns; ++i) {
                p.fetch_residual(index, full, s.residual + i * C::kTileM * kResidualColumns,
                                 column + i * kResidualColumns, row);
            }
        }
    }
}

// The producer's thread. Residuals wait for the first tile's first stages, which are needed sooner.
template <typename C, typename At>
__device__ __forceinline__ void produce_before_residuals(const Params& p, ResidualSmem<C>& s,
                                                         const At& at) {
    const int last = min(C::kStages, p.num_k_blocks) - 1;
    produce<C>(p, s, at, [&](int tile, int block) {
        if (tile == at.cluster && block == last) EmptyBarrier::arrive(&s.has_begun);
    });
}

// index: counts the residuals that this warpgroup adds.
template <typename C, typename Accumulators>
__device__ __forceinline__ void add_residual(ResidualSmem<C>& s, Accumulators& sums, int index) {
    using T = typename C::Element;
    using Edge = TileEpilogue<C, Epilogue::linear, false>;
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    const int row = thread / 32 * 16 + thread % 32 / 4;     // the thread's first, of the tile
    FullBarrier::wait(&s.residual_full[group], index % 2);  // pairs with fetch_residuals()
    const T* words = s.residual + row * kResidualColumns;
    // A row's pieces of eight lie at their number, exclusive-or the row's in its eight.
    const int piece = thread % 4 ^ row % 8;
#pragma unroll
    for (int i = 0; i < Edge::kRowsOfThread; ++i) {
        const int row_offset = i / 2 * 64 + i % 2 * 8;
#pragma unroll
        for (int q = 0; q < Edge::kColumnGroups; ++q) {
            const int box_row = q / 2 * C::kTileM + row_offset;
            const uint4 eight = *reinterpret_cast<const uint4*>(words + box_row * kResidualColumns +
                                                                (piece ^ q % 2 * 4) * 8);
            Edge::add(sums, i, q, eight);
        }
    }
    __syncwarp();
    if (thread % 32 == 0) EmptyBarrier::arrive(&s.residual_empty);
}

// The same of nothing.
template <typename C>
__device__ __forceinline__ void skip_residual(ResidualSmem<C>& s, int index) {
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    FullBarrier::wait(&s.residual_full[group], index % 2);
    __syncwarp();
    if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.residual_empty);
}

// One warpgroup's tile, the `round`-th that it works on.
template <typename C, typename P>
struct ResidualEdge : TileEpilogue<C, Epilogue::linear, false> {
    using Base = TileEpilogue<C, Epilogue::linear, false>;
    const P& params;
    ResidualSmem<C>& s;
    int round;

    template <typename Accumulators>
    __device__ __forceinline__ void store(Accumulators& sums) const {
        const int count = params.num_residuals();
        for (int i = 0; i < count; ++i) add_residual(s, sums, round * count + i);
        Base::store(sums);
    }
};

// As gemm_kernel, for sums that residuals are added to. P: ResidualParams, or what has its
// functions.
template <typename C, typename P = ResidualParams>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_residual_kernel(const __grid_constant__ P p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<ResidualSmem<C>*>(smem);
    const Schedule<C> at;
    if (threadIdx.x == 0) init_residual_barriers(s);
    init_barriers<C>(s);
    release_next_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % kWarpgroupThreads == 0) produce_before_residuals<C>(p, s, at);
        if (threadIdx.x % kWarpgroupThreads == 32) {
            wait_for_prior_kernel();
            EmptyBarrier::wait(&s.has_begun, 0);
            fetch_residuals<C>(p, s, at);
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        wait_for_prior_kernel();
        int round = 0;
        consume<C>(p, s, at,
                   [&](int m, int n) { return ResidualEdge<C, P>{{p, m, n}, p, s, round++}; });
    }
    __syncwarp();
    if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    }
}

}  // namespace bytetx::gemm
