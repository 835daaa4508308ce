// The two sides of the ring: one thread that fetches operands, warpgroups that multiply them.
#pragma once

#include "common/launch.cuh"
#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

template <typename C>
__device__ __forceinline__ void fetch_a(const Params& p, Smem<C>& s, int stage, int k, int row) {
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&p.a, &s.full[stage], hint, s.a[stage], k, row);
}

// A CTA's share of a stage's rows, which all CTAs of the cluster get.
template <typename C>
__device__ __forceinline__ void fetch_b(const Params& p, Smem<C>& s, int stage, int rank, int k,
                                        int row) {
    constexpr int kRows = C::kTileN / C::kClusterCtas;
    static_assert(kRows % kPermutedRows == 0);
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    auto* part = s.b[stage] + rank * kRows * kBlockK;
    if constexpr (C::kClusterCtas == 1) {
        cute::SM90_TMA_LOAD_5D::copy(&p.b, &s.full[stage], hint, part, k, 0, 0, 0,
                                     row / kPermutedRows);
    } else {
        constexpr uint16_t kAll = (1 << C::kClusterCtas) - 1;
        cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&p.b, &s.full[stage], kAll, hint, part, k, 0, 0, 0,
                                               (row + rank * kRows) / kPermutedRows);
    }
}

// One thread. Weights are nobody's result: the first stages of them are under way while the kernel
// before still runs.
//
// on_fetched(tile, block): called when a block's fetches are under way.
template <typename C, typename At, typename OnFetched>
__device__ __forceinline__ void produce(const Params& p, Smem<C>& s, const At& at,
                                        const OnFetched& on_fetched) {
    const auto fetch_weights = [&](int stage, int block, int n) {
        FullBarrier::arrive_and_expect_tx(&s.full[stage], C::kStageBytes);
        fetch_b(p, s, stage, at.rank, block * kBlockK, n);
    };
    const int num_tiles = p.tiles_m * p.tiles_n;
    const int early = at.cluster < num_tiles ? min(C::kStages, p.num_k_blocks) : 0;  // of one tile
    cute::prefetch_tma_descriptor(&p.a);
    for (int i = 0; i < early; ++i) fetch_weights(i, i, at.tile_n(p, at.cluster));
    wait_for_prior_kernel();
    RingIndex<C::kStages> ring;
    int num_fetched = 0;
    for (int tile = at.cluster; tile < num_tiles; tile += at.num_clusters) {
        const int m = at.tile_m(p, tile), n = at.tile_n(p, tile);
        for (int block = 0; block < p.num_k_blocks; ++block, ++num_fetched, ring.advance()) {
            if (num_fetched >= early) {
                EmptyBarrier::wait(&s.empty[ring.index], ring.phase ^ 1);  // with release_stage
                fetch_weights(ring.index, block, n);
            }
            fetch_a(p, s, ring.index, block * kBlockK, m);
            on_fetched(tile, block);
        }
    }
}

template <typename C, typename At>
__device__ __forceinline__ void produce(const Params& p, Smem<C>& s, const At& at) {
    produce(p, s, at, [](int, int) {});
}

template <typename C>
__device__ __forceinline__ typename C::Element* a_of(Smem<C>& s, int stage) {
    return s.a[stage];
}

template <typename C>
__device__ __forceinline__ typename C::Element* b_of(Smem<C>& s, int stage) {
    return s.b[stage];
}

// Arrives, once a warp, at every CTA that writes to this stage of this CTA.
template <typename C>
__device__ __forceinline__ void release_stage(Smem<C>& s, int stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (C::kClusterCtas == 1) {
        if (lane == 0) EmptyBarrier::arrive(&s.empty[stage]);
    } else {
        EmptyBarrier::arrive(&s.empty[stage], static_cast<uint32_t>(lane), lane < C::kClusterCtas);
    }
}

// sums += rows of a times rows of b over `num_blocks` stages; `ring` is at the first of them and
// ends behind the last. release(stage) gives one back; on_last() is called when all have been seen
// full.
template <typename C, template <typename> typename S, typename Ring, typename Release,
          typename OnLast>
__device__ __forceinline__ void multiply(S<C>& s, int num_blocks, Ring& ring,
                                         typename C::Accumulators& sums, Release&& release,
                                         OnLast&& on_last, int a_offset = 0) {
    using namespace cute;
    typename C::Mma mma;
    auto thread = mma.get_thread_slice(static_cast<int>(threadIdx.x) % kWarpgroupThreads);
    mma.accumulate_ = GMMA::ScaleOut::One;
    const auto multiply_stage = [&] {
        FullBarrier::wait(&s.full[ring.index], ring.phase);
        Tensor a_tile = make_tensor(make_smem_ptr(C::operand(a_of(s, ring.index)) + a_offset),
                                    typename C::LayoutA{});
        Tensor b_tile =
            make_tensor(make_smem_ptr(C::operand(b_of(s, ring.index))), typename C::LayoutB{});
        Tensor a = thread.partition_fragment_A(a_tile);
        Tensor b = thread.partition_fragment_B(b_tile);
        warpgroup_arrive();
        cute::gemm(mma, a, b, sums);
        warpgroup_commit_batch();
    };
    warpgroup_fence_operand(sums);
    int previous = ring.index;
    multiply_stage();
    ring.advance();
    for (int block = 1; block < num_blocks; ++block) {
        multiply_stage();
        warpgroup_wait<1>();  // the block before is done with its stage
        release(previous);
        previous = ring.index;
        ring.advance();
    }
    on_last();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release(previous);
}

}  // namespace bytetx::gemm
