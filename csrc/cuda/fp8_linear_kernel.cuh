// The FP8 GEMM kernel: linear_kernel.cuh's pipeline over rows of E4M3, with an end of its own.
//
// A stage's row of 128 bytes is 128 features. To tensor maps, rings and fetches two E4M3 are one
// element of 16 bits: all of these are the 16-bit kernel's.
#pragma once

#include "cuda/fp8_linear_epilogue.cuh"
#include "cuda/linear_kernel.cuh"

namespace bytetx::gemm {

struct alignas(2) Fp8Pair {
    uint8_t low, high;
};

template <typename Tile_>
struct Fp8Config : Tile_ {
    using Element = Fp8Pair;
    using Tile = Tile_;
    using Fp8 = cutlass::float_e4m3_t;
    static constexpr int kThreads = (Tile::kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static constexpr int kTileM = 64 * Tile::kRowBlocks;
    static constexpr int kAElements = kTileM * kBlockK;
    static constexpr int kBElements = Tile::kTileN * kBlockK;
    static constexpr int kStageBytes = (kAElements + kBElements) * kElementBytes;
    static constexpr int kFeatures = kBlockK * 2;  // of a stage
    using Atom = cute::GMMA::Layout_K_SW128_Atom<Fp8>;
    using LayoutA = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kTileM>, cute::Int<kFeatures>>{}));
    using LayoutB = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<Tile::kTileN>, cute::Int<kFeatures>>{}));
    using Mma = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<
            Fp8, Fp8, float,
            cute::Shape<cute::_64, cute::Int<Tile::kTileN>, cute::Int<kFeatures>>>()));
    using Accumulators = decltype(cute::partition_fragment_C(
        Mma{}, cute::Shape<cute::Int<kTileM>, cute::Int<Tile::kTileN>>{}));

    static __device__ __forceinline__ Fp8* operand(Fp8Pair* rows) {
        return reinterpret_cast<Fp8*>(rows);
    }
};

template <typename C, Epilogue kEpilogue, typename Out>
__device__ __forceinline__ void consume_fp8(const Fp8Params& p, Smem<C>& s, const Schedule<C>& at) {
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
        Fp8TileEpilogue<C, kEpilogue, Out> epilogue{p, at.tile_m(p, tile), at.tile_n(p, tile)};
        epilogue.begin();
        cute::clear(sums);
        EmptyBarrier::wait(&s.order[group], order_phase);  // as in consume()
        order_phase ^= 1;
        const auto release = [&](int stage) { release_stage(s, stage); };
        multiply(s, p.num_k_blocks, ring, sums, release, [&] {
            if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.order[group ^ 1]);
        });
        ring.advance(p.num_k_blocks);
        epilogue.store(sums);
    }
}

template <typename C, Epilogue kEpilogue, typename Out>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_fp8_kernel(const __grid_constant__ Fp8Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<Smem<C>*>(smem);
    const Schedule<C> at;
    init_barriers(s);
    release_next_kernel();
    wait_for_prior_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % kWarpgroupThreads == 0) produce(p, s, at);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        consume_fp8<C, kEpilogue, Out>(p, s, at);
    }
    __syncwarp();
    if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    }
}

}  // namespace bytetx::gemm
