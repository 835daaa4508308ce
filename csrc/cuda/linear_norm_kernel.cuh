// The GEMM kernel whose CTAs own whole rows of d together, and norm them before they are stored.
//
// As linear_kernel.cuh, but the CTAs of a cluster lie beside one another: each fetches a part of
// the rows of a and sends it to all, and its own rows of b. A warpgroup that has its sums takes
// their moments, sends them to the same warpgroup of the other CTAs, and joins what it gets from
// them; the other warpgroup multiplies meanwhile. Through distributed shared memory it reaches its
// cluster. Where rows are wider than two CTAs, kParts clusters exchange what they have joined
// through `workspace`: clusters of four leave 12 SMs of an H200 idle, pairs none.
#pragma once

#include "cuda/linear_kernel.cuh"
#include "cuda/linear_norm_epilogue.cuh"

namespace bytetx::gemm {

// Where a CTA stands in its group, and the tiles of rows that the group works on.
template <typename C>
struct RowSchedule {
    int place = static_cast<int>(blockIdx.x) % C::kGroupCtas;
    int rank = place % C::kClusterCtas;
    int cluster = static_cast<int>(blockIdx.x) / C::kGroupCtas;
    int num_clusters = static_cast<int>(gridDim.x) / C::kGroupCtas;

    __device__ __forceinline__ int tile_m(const Params&, int tile) const {
        return tile * C::kTileM;
    }
    __device__ __forceinline__ int tile_n(const Params&, int) const { return place * C::kTileN; }
};

template <typename C>
__device__ __forceinline__ void produce_rows(const Params& p, Smem<C>& s,
                                             const RowSchedule<C>& at) {
    constexpr int kRows = C::kTileM / C::kClusterCtas;
    constexpr uint16_t kAll = (1 << C::kClusterCtas) - 1;
    static_assert(kRows % 8 == 0);  // the period of the swizzle
    const auto a_hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const auto b_hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    const int b_row = at.tile_n(p, 0) / kPermutedRows;
    RingIndex<C::kStages> ring;
    for (int tile = at.cluster; tile < p.tiles_m; tile += at.num_clusters) {
        const int m = at.tile_m(p, tile) + at.rank * kRows;
        for (int block = 0; block < p.num_k_blocks; ++block, ring.advance()) {
            EmptyBarrier::wait(&s.empty[ring.index], ring.phase ^ 1);  // pairs with release_stage
            uint64_t* full = &s.full[ring.index];
            FullBarrier::arrive_and_expect_tx(full, C::kStageBytes);
            const int k = block * kBlockK;
            auto* part = s.a[ring.index] + at.rank * kRows * kBlockK;
            cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&p.a, full, kAll, a_hint, part, k, m);
            cute::SM90_TMA_LOAD_5D::copy(&p.b, full, b_hint, s.b[ring.index], k, 0, 0, 0, b_row);
        }
    }
}

// One thread beside the producer's: a tile's residuals, as soon as those before have been read.
template <typename C>
__device__ __forceinline__ void fetch_residuals(const RowNormParams& p, RowNormSmem<C>& s,
                                                const RowSchedule<C>& at) {
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    const int group = at.tile_n(p, 0) / kPermutedRows;
    int round = 0;
    for (int tile = at.cluster; tile < p.tiles_m; tile += at.num_clusters, ++round) {
        EmptyBarrier::wait(&s.residual_empty, round % 2 ^ 1);  // pairs with add_residual()
        uint64_t* full = &s.residual_full[round % C::kConsumers];
        FullBarrier::arrive_and_expect_tx(full, sizeof(s.residual));
        cute::SM90_TMA_LOAD_3D::copy(&p.residual_map, full, hint, s.residual, 0, at.tile_m(p, tile),
                                     group);
    }
}

// The CTA's columns of what no kernel writes..
template <typename C>
__device__ __forceinline__ void load_parameters(const RowNormParams& p, RowNormSmem<C>& s, int n) {
    using T = typename C::Element;
    const auto load = [&](float* to, const void* from) {
        for (int i = static_cast<int>(threadIdx.x); i < C::kTileN; i += C::kThreads) {
            to[i] = static_cast<float>(static_cast<const T*>(from)[n + i]);
        }
    };
    load(s.bias, p.bias);
    load(s.weight, p.weight);
    load(s.shift, p.shift);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_row_norm_kernel(const __grid_constant__ RowNormParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<RowNormSmem<C>*>(smem);
    const RowSchedule<C> at;
    if (threadIdx.x == 0) {
        for (auto& barriers : s.arrived) {
            for (uint64_t& barrier : barriers) FullBarrier::init(&barrier, 1);
        }
        for (uint64_t& barrier : s.residual_full) FullBarrier::init(&barrier, 1);
        EmptyBarrier::init(&s.residual_empty, 4);
    }
    load_parameters(p, s, at.tile_n(p, 0));
    init_barriers<C>(s);
    __syncthreads();  // the cluster's barrier orders no stores
    release_next_kernel();
    wait_for_prior_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % kWarpgroupThreads == 0) produce_rows<C>(p, s, at);
        if (threadIdx.x % kWarpgroupThreads == 32) fetch_residuals<C>(p, s, at);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        int round = 0;
        consume<C>(p, s, at, [&](int m, int) { return RowNormEdge<C>{p, s, m, round++}; });
    }
    __syncwarp();
    cute::cluster_arrive_relaxed();  // no CTA leaves while another may still signal it
    cute::cluster_wait();
}

}  // namespace bytetx::gemm
