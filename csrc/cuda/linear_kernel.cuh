// The persistent GEMM kernel: a producer and two consumer warpgroups, in clusters.
#pragma once

#include "cuda/linear_epilogue.cuh"
#include "cuda/linear_mainloop.cuh"

namespace bytetx::gemm {

template <typename C>
__device__ __forceinline__ void init_barriers(Smem<C>& s) {
    constexpr int kReaders = 4 * C::kClusterCtas;  // warps, over all CTAs that a fetch reaches
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.full[i], 1);
            EmptyBarrier::init(&s.empty[i], kReaders);
        }
        for (int i = 0; i < C::kConsumers; ++i) EmptyBarrier::init(&s.order[i], 4);
        cutlass::arch::fence_barrier_init();
    }
    if constexpr (C::kClusterCtas > 1) {
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    } else {
        __syncthreads();
    }
}

// make_epilogue(m, n): what loads and stores the tile that begins there.
template <typename C, typename At, typename MakeEdge>
__device__ __forceinline__ void consume(const Params& p, Smem<C>& s, const At& at,
                                        const MakeEdge& make_epilogue) {
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    RingIndex<C::kStages> ring;
    uint32_t order_phase = 1 ^ group;  // the first warpgroup does not wait for its first tile
    typename C::Accumulators sums;
    int tile = at.cluster;
    if (group > 0) {  // the other warpgroup's first tile
        tile += at.num_clusters;
        ring.advance(p.num_k_blocks);
    }
    for (; tile < p.tiles_m * p.tiles_n; tile += C::kConsumers * at.num_clusters) {
        const auto epilogue = make_epilogue(at.tile_m(p, tile), at.tile_n(p, tile));
        epilogue.load(sums);
        // A stage's barrier tells odd fills from even ones, no more: whoever runs ahead of the
        // other warpgroup would take an older fill for its own.
        EmptyBarrier::wait(&s.order[group], order_phase);
        order_phase ^= 1;
        const auto release = [&](int stage) { release_stage(s, stage); };
        multiply(s, p.num_k_blocks, ring, sums, release, [&] {
            if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.order[group ^ 1]);
        });
        ring.advance(p.num_k_blocks);
        epilogue.store(sums);
    }
}

template <typename C, Epilogue kEpilogue, bool kGated>
__global__ void __launch_bounds__(C::kThreads, 1) gemm_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<Smem<C>*>(smem);
    const Schedule<C> at;
    init_barriers(s);
    release_next_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % kWarpgroupThreads == 0) produce(p, s, at);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        wait_for_prior_kernel();
        consume(p, s, at,
                [&](int m, int n) { return TileEpilogue<C, kEpilogue, kGated>{p, m, n}; });
    }
    __syncwarp();
    if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    }
}

}  // namespace bytetx::gemm
