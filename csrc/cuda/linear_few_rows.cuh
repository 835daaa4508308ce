// The GEMM kernel for few rows: one tile a cluster, whose CTAs share out k and add their sums up
// through distributed shared memory, in the order of their ranks.
//
// What counts is latency: weights do not depend on the kernel before, so their first stages are
// under way before it has ended.
#pragma once

#include "common/launch.cuh"
#include "cuda/linear_epilogue.cuh"
#include "cuda/linear_mainloop.cuh"

namespace bytetx::gemm {

template <int kRowBlocks_, int kTileN_, int kStages_>
struct FewRowsTiling {
    static constexpr int kRowBlocks = kRowBlocks_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kStages = kStages_;
    static constexpr int kClusterCtas = 1;  // that share columns; those that share k come at launch
    static constexpr int kConsumers = 1;
    static constexpr bool kIsForFewRows = true;
};

constexpr int kFewRowsThreads = kWarpgroupThreads + 32;  // and a warp that fetches

// Feature blocks [begin, end) of one CTA.
struct Share {
    int begin, end;
};

__device__ __forceinline__ Share share_of(int num_blocks, int rank, int num_ranks) {
    return {num_blocks * rank / num_ranks, num_blocks * (rank + 1) / num_ranks};
}

// One thread. Weights first, as many as there is room for; then, behind the wait, the rest.
template <typename C>
__device__ __forceinline__ void fetch_all(const Params& p, Smem<C>& s, Share share, int m, int n) {
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const auto fetch_weights = [&](int stage, int block) {
        FullBarrier::arrive_and_expect_tx(&s.full[stage], C::kStageBytes);
        cute::SM90_TMA_LOAD_5D::copy(&p.b, &s.full[stage], hint, s.b[stage], block * kBlockK, 0, 0,
                                     0, n / kPermutedRows);
    };
    const int early = min(C::kStages, share.end - share.begin);
    for (int i = 0; i < early; ++i) fetch_weights(i, share.begin + i);
    wait_for_prior_kernel();
    RingIndex<C::kStages> ring;
    for (int block = share.begin; block < share.end; ++block, ring.advance()) {
        if (block - share.begin >= early) {
            EmptyBarrier::wait(&s.empty[ring.index], ring.phase ^ 1);  // pairs with consume_tile
            fetch_weights(ring.index, block);
        }
        cute::SM90_TMA_LOAD_2D::copy(&p.a, &s.full[ring.index], hint, s.a[ring.index],
                                     block * kBlockK, m);
    }
}

// Eight neighbouring sums of a row: where they lie in the ring's memory once that is free.
template <typename C>
__device__ __forceinline__ float4* eight_sums(Smem<C>& s, int row, int group) {
    return reinterpret_cast<float4*>(s.a[0]) + (row * (C::kTileN / 8) + group) * 2;
}

// Adds what all ranks of the cluster have put down; each rank finishes its part of the tile.
// store(row, column, eight): of d.
template <typename C, Epilogue kEpilogue, bool kGated, typename Store>
__device__ __forceinline__ void add_up(const Params& p, Smem<C>& s, int m, int n, int rank,
                                       int num_ranks, const Store& store) {
    using T = typename C::Element;
    constexpr int kGroups = C::kTileN / 8;
    const auto total = [&](int row, int group, float (&sum)[8]) {
        const uint32_t local = cute::cast_smem_ptr_to_uint(eight_sums(s, row, group));
        for (int e = 0; e < 8; ++e) sum[e] = 0.0f;
        for (int from = 0; from < num_ranks; ++from) {
            uint32_t remote;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(from));
            float4 part[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(part[i].x), "=f"(part[i].y), "=f"(part[i].z), "=f"(part[i].w)
                             : "r"(remote + 16 * i));
                sum[4 * i] += part[i].x;
                sum[4 * i + 1] += part[i].y;
                sum[4 * i + 2] += part[i].z;
                sum[4 * i + 3] += part[i].w;
            }
        }
    };
    constexpr int kOutGroups = kGated ? kGroups / 2 : kGroups;
    for (int v = rank * kWarpgroupThreads + static_cast<int>(threadIdx.x);
         v < C::kTileM * kOutGroups; v += num_ranks * kWarpgroupThreads) {
        const int row = v / kOutGroups, group = v % kOutGroups;
        // Gated: 32 gates, then their 32 values.
        const int of_sums = kGated ? group / 4 * 8 + group % 4 : group;
        if (m + row >= p.m || n + of_sums * 8 >= p.n) continue;
        float x[8], factor[8];
        total(row, of_sums, x);
        if constexpr (kGated) total(row, of_sums + 4, factor);
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = activate<kEpilogue>(x[e], p.activation);
            if constexpr (kGated) x[e] *= factor[e];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pack(x[2 * i], x[2 * i + 1], T{});
        store(m + row, (kGated ? n / 2 : n) + group * 8,
              make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// Every thread's sums, where add_up() finds them.
template <typename C, typename Edge>
__device__ __forceinline__ void put_down(Smem<C>& s, const Edge& edge,
                                         const typename C::Sums& sums) {
    cutlass::arch::NamedBarrier::arrive_and_wait(kWarpgroupThreads, 0);  // the ring is read
#pragma unroll
    for (int i = 0; i < edge.kRowsOfThread; ++i) {
#pragma unroll
        for (int q = 0; q < edge.kColumnGroups; ++q) {
            float4* place = eight_sums(s, edge.row(i) - edge.m, q * 4 + edge.lane % 4);
            const auto at = [&](int e) { return sums(edge.at(i, q, e)); };
            place[0] = make_float4(at(0), at(1), at(2), at(3));
            place[1] = make_float4(at(4), at(5), at(6), at(7));
        }
    }
}

template <typename C, Epilogue kEpilogue, bool kGated>
__device__ __forceinline__ void consume_tile(const Params& p, Smem<C>& s, Share share, int m, int n,
                                             int rank, int num_ranks) {
    typename C::Sums sums;
    const TileEdge<C, kEpilogue, kGated> edge{p, m, n};
    wait_for_prior_kernel();  // the residual is another kernel's, and d may be what one still reads
    edge.load(sums, rank == 0);
    RingIndex<C::kStages> ring;
    const auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.empty[stage]);
    };
    multiply(s, share.end - share.begin, ring, sums, release, [] {});
    if (num_ranks == 1) return edge.store(sums);
    put_down(s, edge, sums);
}

template <typename C, Epilogue kEpilogue, bool kGated>
__global__ void __launch_bounds__(kFewRowsThreads)
    gemm_few_rows_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<Smem<C>*>(smem);
    static_assert(sizeof(s.a) + sizeof(s.b) >= C::kTileM * C::kTileN * sizeof(float));
    const int rank = static_cast<int>(cute::block_rank_in_cluster());
    const int num_ranks = static_cast<int>(cute::cluster_shape().x);
    const int tile = static_cast<int>(blockIdx.x) / num_ranks;
    const int m = tile / p.tiles_n * C::kTileM, n = tile % p.tiles_n * C::kTileN;
    const Share share = share_of(p.num_k_blocks, rank, num_ranks);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.full[i], 1);
            EmptyBarrier::init(&s.empty[i], 4);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    release_next_kernel();
    const bool is_fetcher = uniform(static_cast<int>(threadIdx.x) / 32) == 4;
    if (is_fetcher) {
        if (threadIdx.x % 32 == 0) fetch_all(p, s, share, m, n);
        __syncwarp();
    } else {
        consume_tile<C, kEpilogue, kGated>(p, s, share, m, n, rank, num_ranks);
    }
    if (num_ranks == 1) return;
    cute::cluster_arrive();
    cute::cluster_wait();  // every rank has put its sums down
    if (!is_fetcher) {
        using T = typename C::Element;
        const int64_t d_columns = kGated ? p.n / 2 : p.n;
        add_up<C, kEpilogue, kGated>(
            p, s, m, n, rank, num_ranks, [&](int row, int column, uint4 eight) {
                T* out = static_cast<T*>(p.d) + row * d_columns + column;
                *reinterpret_cast<uint4*>(out) = eight;
            });
    }
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();  // and nobody reads this CTA's any more
}

}  // namespace bytetx::gemm
