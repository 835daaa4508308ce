// scatter_kernel.cuh with a fused reduce: tiles of this rank's rows come last, add residual, bias
// and what the other ranks have stored for them, and are not stored as a part.
//
// linear_residual.cuh says how arrays come to a tile; a part is fetched when its source has stored
// the tile's rows. Only tiles of clusters whose rows all belong to this rank wait like this, after
// all other tiles of their CTA: so what one rank waits for never queues behind a wait of another.
// Rows that share a cluster's tile with another rank's rows are stored as a part and summed by
// sum_rows.cu, as without this kernel.
#pragma once

#include "comm/scatter_kernel.cuh"
#include "cuda/linear_residual.cuh"

namespace bytetx::gemm {

struct ScatterAddParams : ScatterParams {
    CUtensorMap residual_map;      // {n, own rows}
    CUtensorMap parts_maps[2];     // of even and of odd calls: {n, own rows, size}
    int first_adding, num_adding;  // rows of cluster tiles whose tiles add parts
};

// RasterOrder of all other rows of cluster tiles, from the one after this rank's on, then of those
// that add parts.
template <typename C>
struct FusedReduceSchedule : Schedule<C> {
    const ScatterAddParams& all;

    __device__ __forceinline__ bool adds(int tile) const {
        return tile >= (all.gemm.tiles_m - all.num_adding) * all.gemm.tiles_n;
    }
    __device__ __forceinline__ typename Schedule<C>::Place place(const Params& p, int tile) const {
        const int num_others = p.tiles_m - all.num_adding;
        const bool is_adding = adds(tile);
        if (is_adding) tile -= num_others * p.tiles_n;
        const int whole = p.raster.rows * p.tiles_n;
        const int band = tile / whole, within = tile % whole;
        const int rows = is_adding ? all.num_adding : num_others;
        const int height = min(p.raster.rows, rows - band * p.raster.rows);
        int row = band * p.raster.rows + within % height + all.first_adding;
        if (!is_adding) row += all.num_adding;
        if (row >= p.tiles_m) row -= p.tiles_m;
        return {row, within / height};
    }
    __device__ __forceinline__ int tile_m(const Params& p, int tile) const {
        return (place(p, tile).m * C::kClusterCtas + this->rank) * C::kTileM;
    }
    __device__ __forceinline__ int tile_n(const Params& p, int tile) const {
        return place(p, tile).n * C::kTileN;
    }
};

template <typename C>
struct FusedReduceEpilogue : ScatterEpilogue<C> {
    using Scatter = ScatterEpilogue<C>;
    using Plain = typename Scatter::Base;
    const ScatterAddParams& params;
    ResidualSmem<C>& s;

    __device__ __forceinline__ bool adds() const {
        const int row = this->m / (C::kTileM * C::kClusterCtas) - params.first_adding;
        return row >= 0 && row < params.num_adding;
    }

    template <typename Accumulators>
    __device__ __forceinline__ void load(Accumulators& sums) const {
#pragma unroll
        for (int i = 0; i < cute::size(Accumulators{}); ++i) sums(i) = 0.0f;
        if (adds() && this->p.bias != nullptr) this->add_bias(sums);
    }

    template <typename Accumulators>
    __device__ __forceinline__ void store(Accumulators& sums) const {
        if (!adds()) return Scatter::store(sums);
        const int count = params.peers.size;
#pragma unroll 1
        for (int i = 0; i < count; ++i) add_residual(s, sums, i);
        if (count % 2 != 0) skip_residual(s, 1);
        Plain::store(sums);
        this->publish(comm::this_epoch(params.peers, comm::kSumEpoch));
    }
};

// One thread: fetches the arrays of tiles that add parts, each as soon as the one before has been
// read: the residual, then the other ranks' parts in their order. A tile gets an even number of
// arrays, an empty one after an odd number, so that each tile begins with the same phase.
template <typename C>
__device__ __forceinline__ void fetch_parts(const ScatterAddParams& p, ResidualSmem<C>& s,
                                            const FusedReduceSchedule<C>& at) {
    static_assert(C::kConsumers == 2);
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kSumEpoch);
    const CUtensorMap* parts = &p.parts_maps[epoch & 1];
    const int own = p.offsets[p.peers.rank];
    int phase = 1, group = 0;
    for (int tile = at.cluster; tile < p.gemm.tiles_m * p.gemm.tiles_n;
         tile += at.num_clusters, group ^= 1) {
        if (!at.adds(tile)) continue;
        const int column = at.tile_n(p.gemm, tile), row = at.tile_m(p.gemm, tile);
        uint64_t* full = &s.residual_full[group];
#pragma unroll 1
        for (int index = 0; index < (p.peers.size + 1) / 2 * 2; ++index, phase ^= 1) {
            if (index == p.peers.size) {
                EmptyBarrier::wait(&s.residual_empty, phase);
                FullBarrier::arrive(full);
                continue;
            }
            const int source = index <= p.peers.rank ? index - 1 : index;
            if (index > 0 && row < p.gemm.m) {  // a tile beyond all rows has no parts
                const int number = row / C::kTileM - own / C::kTileM;
                comm::wait_for(
                    p.peers, source,
                    counter_at(p.peers, p.peers.rank, Counted::tiles, epoch, source, number),
                    p.gemm.tiles_n);
                comm::fence_proxies();  // what follows are bulk copies
            }
            EmptyBarrier::wait(&s.residual_empty, phase);  // pairs with add_residual()
            FullBarrier::arrive_and_expect_tx(full, sizeof(s.residual));
#pragma unroll
            for (int i = 0; i < C::kTileN / kResidualColumns; ++i) {
                auto* to = s.residual + i * C::kTileM * kResidualColumns;
                const int from = column + i * kResidualColumns;
                if (index == 0) {
                    cute::SM90_TMA_LOAD_2D::copy(&p.residual_map, full, hint, to, from, row - own);
                } else {
                    cute::SM90_TMA_LOAD_3D::copy(parts, full, hint, to, from, row - own, source);
                }
            }
        }
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_scatter_add_kernel(const __grid_constant__ ScatterAddParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<ResidualSmem<C>*>(smem);
    const FusedReduceSchedule<C> at{{}, p};
    if (threadIdx.x == 0) init_residual_barriers(s);
    init_barriers<C>(s);
    wait_for_prior_kernel();
    release_next_kernel();  // not earlier: as in gemm_scatter_kernel
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
        if (thread == 0) produce<C>(p.gemm, s, at);
        if (thread == 32) fetch_parts<C>(p, s, at);
        if (thread == 64 && blockIdx.x == 0) {
            comm::begin_sum(p.peers, comm::this_epoch(p.peers, comm::kSumEpoch));
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        comm::wait_for_slots(p.peers, comm::this_epoch(p.peers, comm::kSumEpoch));
        consume<C>(p.gemm, s, at,
                   [&](int m, int n) { return FusedReduceEpilogue<C>{{{p.gemm, m, n}, p}, p, s}; });
    }
    __syncwarp();
    if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    }
}

}  // namespace bytetx::gemm
