// The GEMM kernel for few rows whose tiles go to every rank: the first half of gemm_all_reduce.
//
// As cuda/linear_few_rows.cuh up to the sums that a cluster's CTAs add up; then each CTA stores its
// part of the tile into this rank's slot in everyone's memory and counts it there.
#pragma once

#include "comm/peers.cuh"
#include "comm/schedule.cuh"
#include "comm/sum_rows.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx::gemm {

using comm::Counted;

// That a cluster counts for its tile in all, however many CTAs share k: ranks whose shares of k
// differ may split them differently, and know only their own splits.
constexpr int kCountOfTile = 8;

struct PushParams {
    Params gemm;  // residual: partial
    comm::Peers peers;
};

template <typename C>
__device__ __forceinline__ void put_down_share(const PushParams& p, Smem<C>& s, Share share, int m,
                                               int n, int rank) {
    typename C::Sums sums;
    const TileEdge<C, Epilogue::linear, false> edge{p.gemm, m, n};
    edge.load(sums, rank == 0);
    RingIndex<C::kStages> ring;
    const auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.empty[stage]);
    };
    multiply(s, share.end - share.begin, ring, sums, release, [] {});
    put_down(s, edge, sums);
}

// This CTA's part of the tile, to all ranks. The slots hold [size, m, n].
template <typename C>
__device__ __forceinline__ void push_part(const PushParams& p, Smem<C>& s, uint32_t epoch, int m,
                                          int n, int rank, int num_ranks) {
    const comm::Peers& peers = p.peers;
    comm::wait_for_slots(peers, epoch);
    const int64_t own_slot = int64_t{peers.rank} * p.gemm.m;
    add_up<C, Epilogue::linear, false>(
        p.gemm, s, m, n, rank, num_ranks, [&](int row, int column, uint4 eight) {
            const int64_t offset = ((own_slot + row) * p.gemm.n + column) * kElementBytes;
            for (int peer = 0; peer < peers.size; ++peer) {
                uint8_t* slots = comm::quarter_at(peers, peer, Counted::tiles, epoch);
                *reinterpret_cast<uint4*>(slots + offset) = eight;
            }
        });
    cutlass::arch::NamedBarrier::arrive_and_wait(kWarpgroupThreads, 0);  // all have stored
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < peers.size) {  // pairs with wait_for_tile() there
        comm::fence_system();
        comm::add_relaxed(counter_at(peers, peer, Counted::tiles, epoch, peers.rank, m / C::kTileM),
                          rank == 0 ? kCountOfTile - num_ranks + 1 : 1);
    }
    __syncwarp();
}

template <typename C>
__global__ void __launch_bounds__(kFewRowsThreads)
    gemm_push_kernel(const __grid_constant__ PushParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<Smem<C>*>(smem);
    static_assert(sizeof(s.a) + sizeof(s.b) >= C::kTileM * C::kTileN * sizeof(float));
    const int rank = static_cast<int>(cute::block_rank_in_cluster());
    const int num_ranks = static_cast<int>(cute::cluster_shape().x);
    const int tile = static_cast<int>(blockIdx.x) / num_ranks;
    const int m = tile / p.gemm.tiles_n * C::kTileM, n = tile % p.gemm.tiles_n * C::kTileN;
    const Share share = share_of(p.gemm.num_k_blocks, rank, num_ranks);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.full[i], 1);
            EmptyBarrier::init(&s.empty[i], 4);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const bool is_fetcher = uniform(static_cast<int>(threadIdx.x) / 32) == 4;
    if (is_fetcher) {
        if (threadIdx.x % 32 == 0) fetch_all(p.gemm, s, share, m, n);
        __syncwarp();
    } else {
        wait_for_prior_kernel();
        // Only now: what follows relies on all kernels before this one having ended.
        release_next_kernel();
        put_down_share(p, s, share, m, n, rank);
    }
    cute::cluster_arrive();
    cute::cluster_wait();  // every rank has put its sums down
    if (!is_fetcher) {
        const uint32_t epoch = comm::this_epoch(p.peers, comm::kSumEpoch);
        push_part(p, s, epoch, m, n, rank, num_ranks);
    }
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();  // and nobody reads this CTA's any more
}

template <typename C>
void launch_push(const GemmSumParams& o, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(Smem<C>);
    PushParams p{};
    p.gemm = make_params<C>(o.linear);
    p.peers = comm::make_peers(o.peers);
    const auto kernel = gemm_push_kernel<C>;
    allow_smem(kernel, kSmemBytes);
    const int splits = std::min(std::max(o.linear.splits, 1), p.gemm.num_k_blocks);
    launch_kernel(kernel,
                  {dim3(p.gemm.tiles_m * p.gemm.tiles_n * splits), dim3(kFewRowsThreads),
                   kSmemBytes, stream, splits},
                  p);
    comm::launch_sum(o,
                     {.first_row = 0,
                      .num_rows = p.gemm.m,
                      .first_tile = 0,
                      .num_tiles = p.gemm.tiles_m,
                      .tile_rows = C::kTileM,
                      .count_of_tile = p.gemm.tiles_n * kCountOfTile},
                     stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_push_tiling(const GemmSumParams& o, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) return launch_push<Config<cutlass::half_t, Tile>>(o, stream);
    launch_push<Config<cutlass::bfloat16_t, Tile>>(o, stream);
}

}  // namespace bytetx::gemm
