// The GEMM kernel for few and middling rows: one tile a cluster, whose CTAs share out k.
//
// One to three warpgroups hold a tile's rows; linear_parts.cuh says how CTAs that share k add their
// sums up. What counts is latency: weights do not depend on the kernel before, so their first
// stages are under way before it has ended.
#pragma once

#include "common/launch.cuh"
#include "cuda/linear_mainloop.cuh"
#include "cuda/linear_parts.cuh"

namespace bytetx::gemm {

// Registers: 64 * kRowBlocks * kTileN / 128 of a thread hold sums. kStages: at most; the
// launch says how many.
template <int kTogether_, int kRowBlocks_, int kTileN_, int kStages_ = 16>
struct SmallMTiling {
    static constexpr int kTogether = kTogether_;
    static constexpr int kRowBlocks = kRowBlocks_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kStages = kStages_;
    static constexpr int kClusterCtas = 1;  // that share columns; those that share k come at launch
    static constexpr int kConsumers = 1;
    static constexpr bool kIsForSmallM = true;
    static constexpr int kConsumerThreads = kTogether * kWarpgroupThreads;
    static constexpr int kThreads = kConsumerThreads + 32;  // and a warp that fetches
};

// Rows of a tile that m does not have are not fetched: as zeros they would take as long as rows
// that are there. What shared memory holds in their place stays in rows that are not stored.
struct SmallMParams : Params {
    int num_stages;
    int stage_bytes;  // that a stage gets
};

// Feature blocks [begin, end) of one CTA.
struct Share {
    int begin, end;
};

__device__ __forceinline__ Share share_of(int num_blocks, int rank, int num_ranks) {
    return {num_blocks * rank / num_ranks, num_blocks * (rank + 1) / num_ranks};
}

template <typename C>
struct SmallMSmem {
    uint64_t full[C::kStages], empty[C::kStages];
    uint64_t arrived;
    struct {
        alignas(1024) typename C::Element a[C::kAElements], b[C::kBElements];
    } stages[1];  // as many as the launch has, then parts
};

template <typename C>
__device__ __forceinline__ typename C::Element* a_of(SmallMSmem<C>& s, int stage) {
    return s.stages[stage].a;
}

template <typename C>
__device__ __forceinline__ typename C::Element* b_of(SmallMSmem<C>& s, int stage) {
    return s.stages[stage].b;
}

// One thread. Weights first, as many as there is room for; then, behind the wait, the rest.
template <typename C>
__device__ __forceinline__ void fetch_all(const SmallMParams& p, SmallMSmem<C>& s, Share share,
                                          int m, int n) {
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const auto fetch_weights = [&](int stage, int block) {
        FullBarrier::arrive_and_expect_tx(&s.full[stage], p.stage_bytes);
        cute::SM90_TMA_LOAD_5D::copy(&p.b, &s.full[stage], hint, b_of(s, stage), block * kBlockK, 0,
                                     0, 0, n / kPermutedRows);
    };
    const int early = min(p.num_stages, share.end - share.begin);
    cute::prefetch_tma_descriptor(&p.a);
    for (int i = 0; i < early; ++i) fetch_weights(i, share.begin + i);
    wait_for_prior_kernel();
    AnyRingIndex ring{p.num_stages};
    for (int block = share.begin; block < share.end; ++block, ring.advance()) {
        if (block - share.begin >= early) {
            EmptyBarrier::wait(&s.empty[ring.index], ring.phase ^ 1);  // pairs with consume_tile
            fetch_weights(ring.index, block);
        }
        cute::SM90_TMA_LOAD_2D::copy(&p.a, &s.full[ring.index], hint, a_of(s, ring.index),
                                     block * kBlockK, m);
    }
}

template <typename C, Epilogue kEpilogue, bool kGated>
__global__ void __launch_bounds__(C::Tile::kThreads)
    gemm_small_m_kernel(const __grid_constant__ SmallMParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<SmallMSmem<C>*>(smem);
    const int rank = static_cast<int>(cute::block_rank_in_cluster());
    const int num_ranks = static_cast<int>(cute::cluster_shape().x);
    const Parts<C, kEpilogue, kGated> parts{reinterpret_cast<float4*>(s.stages + p.num_stages),
                                            &s.arrived, rank, num_ranks};
    const int tile = static_cast<int>(blockIdx.x) / num_ranks;
    const int m = tile / p.tiles_n * C::kTileM, n = tile % p.tiles_n * C::kTileN;
    const Share share = share_of(p.num_k_blocks, rank, num_ranks);
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.num_stages; ++i) {
            FullBarrier::init(&s.full[i], 1);
            EmptyBarrier::init(&s.empty[i], 4 * C::Tile::kTogether);
        }
        parts.expect();
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (num_ranks > 1) cute::cluster_arrive();
    release_next_kernel();
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    if (group == C::Tile::kTogether) {
        if (threadIdx.x % 32 == 0) fetch_all(p, s, share, m, n);
        __syncwarp();
        if (num_ranks > 1) cute::cluster_wait();
        return;
    }
    typename C::Accumulators sums;
    const TileEpilogue<C, kEpilogue, kGated> epilogue{p, m + group * C::kWarpgroupM, n};
    // The residual is another kernel's, and d may be what one still reads.
    const auto wait = [] { wait_for_prior_kernel(); };
    if (num_ranks == 1) {
        epilogue.load_all(sums, wait);
    } else {
        epilogue.load_units(sums, rank, num_ranks, wait);
    }
    AnyRingIndex ring{p.num_stages};
    const auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.empty[stage]);
    };
    multiply(
        s, share.end - share.begin, ring, sums, release, [] {}, group * C::kWarpgroupM * kBlockK);
    if (!parts.are_used(num_ranks)) return epilogue.store(sums);
    if (num_ranks > 1) cute::cluster_wait();  // all ranks expect what now comes
    parts.push(sums);
    parts.finish(epilogue);
}

}  // namespace bytetx::gemm
