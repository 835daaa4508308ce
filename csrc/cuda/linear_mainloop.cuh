// The two sides of the ring: one thread that fetches operands, warpgroups that multiply them.
#pragma once

#include "common/launch.cuh"
#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

// A CTA's share of a stage's rows: all of them, or a part that all CTAs of `mask` get.
template <typename C>
__device__ __forceinline__ void fetch_a(const Params& p, Smem<C>& s, int stage, int share,
                                        uint16_t mask, int k, int row) {
    constexpr int kRows = C::kTileM / C::kClusterN;
    static_assert(kRows % 8 == 0);
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    auto* part = s.a[stage] + share * kRows * kBlockK;
    if constexpr (C::kClusterN == 1) {
        cute::SM90_TMA_LOAD_2D::copy(&p.a, &s.full[stage], hint, part, k, row);
    } else {
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&p.a, &s.full[stage], mask, hint, part, k,
                                               row + share * kRows);
    }
}

template <typename C>
__device__ __forceinline__ void fetch_b(const Params& p, Smem<C>& s, int stage, int share,
                                        uint16_t mask, int k, int row) {
    constexpr int kRows = C::kTileN / C::kClusterM;
    static_assert(kRows % kPermutedRows == 0);
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    auto* part = s.b[stage] + share * kRows * kBlockK;
    if constexpr (C::kClusterM == 1) {
        cute::SM90_TMA_LOAD_5D::copy(&p.b, &s.full[stage], hint, part, k, 0, 0, 0,
                                     row / kPermutedRows);
    } else {
        cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&p.b, &s.full[stage], mask, hint, part, k, 0, 0, 0,
                                               (row + share * kRows) / kPermutedRows);
    }
}

// CTAs of this one's row and column of the cluster, as multicast masks.
template <typename C>
__device__ __forceinline__ uint16_t row_mask(const Schedule<C>& at) {
    return static_cast<uint16_t>(((1 << C::kClusterN) - 1) << (at.row * C::kClusterN));
}

template <typename C>
__device__ __forceinline__ uint16_t column_mask(const Schedule<C>& at) {
    uint16_t mask = 0;
#pragma unroll
    for (int i = 0; i < C::kClusterM; ++i) mask |= 1 << (i * C::kClusterN + at.column);
    return mask;
}

template <typename C, typename At>
__device__ __forceinline__ void produce(const Params& p, Smem<C>& s, const At& at) {
    RingIndex<C::kStages> ring;
    for (int tile = at.cluster; tile < p.tiles_m * p.tiles_n; tile += at.num_clusters) {
        const int m = at.tile_m(p, tile), n = at.tile_n(p, tile);
        for (int block = 0; block < p.num_k_blocks; ++block, ring.advance()) {
            EmptyBarrier::wait(&s.empty[ring.index], ring.phase ^ 1);  // pairs with release_stage
            uint64_t* full = &s.full[ring.index];
            FullBarrier::arrive_and_expect_tx(full, C::kStageBytes);
            const int k = block * kBlockK;
            fetch_a(p, s, ring.index, at.column, row_mask(at), k, m);
            fetch_b(p, s, ring.index, at.row, column_mask(at), k, n);
        }
    }
}

// Arrives, once a warp, at every CTA that writes to this stage of this CTA.
template <typename C>
__device__ __forceinline__ void release_stage(Smem<C>& s, int stage, const Schedule<C>& at) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (C::kClusterCtas == 1) {
        if (lane == 0) EmptyBarrier::arrive(&s.empty[stage]);
    } else {
        const uint32_t writers = row_mask(at) | column_mask(at);
        EmptyBarrier::arrive(&s.empty[stage], static_cast<uint32_t>(lane),
                             lane < C::kClusterCtas && (writers >> lane & 1));
    }
}

// sums += rows of a times rows of b; `ring` is at the tile's first stage and ends behind its last.
// on_last is called when every stage has been seen full.
template <typename C, typename OnLast>
__device__ __forceinline__ void multiply(const Params& p, Smem<C>& s, const Schedule<C>& at,
                                         int group_row, RingIndex<C::kStages>& ring,
                                         typename C::Sums& sums, OnLast&& on_last) {
    using namespace cute;
    typename C::Mma mma;
    auto thread = mma.get_thread_slice(static_cast<int>(threadIdx.x) % kWarpgroupThreads);
    mma.accumulate_ = GMMA::ScaleOut::One;
    const auto multiply_stage = [&] {
        FullBarrier::wait(&s.full[ring.index], ring.phase);
        Tensor a_tile = make_tensor(make_smem_ptr(s.a[ring.index] + group_row * kBlockK),
                                    typename C::LayoutA{});
        Tensor b_tile = make_tensor(make_smem_ptr(s.b[ring.index]), typename C::LayoutB{});
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
    for (int block = 1; block < p.num_k_blocks; ++block) {
        multiply_stage();
        warpgroup_wait<1>();  // the block before is done with its stage
        release_stage(s, previous, at);
        previous = ring.index;
        ring.advance();
    }
    on_last();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release_stage(s, previous, at);
}

}  // namespace bytetx::gemm
