// scatter_epilogue.cuh with a fused reduce: tiles of this rank's rows come last, add residual, bias
// and what the other ranks have stored for them, and are not stored as a part.
//
// gemm/tile_input.cuh says how arrays come to a tile; a part is fetched when its source has stored
// the tile's rows. Only tiles of clusters whose rows all belong to this rank wait like this, after
// all other tiles of their CTA: so what one rank waits for never queues behind a wait of another.
// Rows that share a cluster's tile with another rank's rows are stored as a part and summed by
// sum_rows.cu, as without this kernel.
#pragma once

#include "comm/scatter_epilogue.cuh"
#include "gemm/tile_input.cuh"

namespace bytetx::gemm {

// RasterOrder of all other rows of cluster tiles, from the one after this rank's on, then of those
// whose tiles add parts.
template <typename C>
struct FusedReduceScheduler : PersistentCta<C> {
    struct Inputs {
        RasterOrder raster;
        int first_adding, num_adding;  // rows of cluster tiles whose tiles add parts
    };
    const Inputs& in;
    int rank = C::kClusterCtas > 1 ? cluster_rank() : 0;
    int cluster = static_cast<int>(blockIdx.x) / C::kClusterCtas;
    int num_clusters = static_cast<int>(gridDim.x) / C::kClusterCtas;

    __device__ __forceinline__ FusedReduceScheduler(const Problem& p, const Inputs& in)
        : PersistentCta<C>{p}, in(in) {}

    struct Place {
        int m, n;
    };

    __device__ __forceinline__ bool adds(int tile) const {
        return tile >= (this->p.tiles_m - in.num_adding) * this->p.tiles_n;
    }
    __device__ __forceinline__ Place place(int tile) const {
        const Problem& p = this->p;
        const int num_others = p.tiles_m - in.num_adding;
        const bool is_adding = adds(tile);
        if (is_adding) tile -= num_others * p.tiles_n;
        const int whole = in.raster.rows * p.tiles_n;
        const int band = tile / whole, within = tile % whole;
        const int rows = is_adding ? in.num_adding : num_others;
        const int height = min(in.raster.rows, rows - band * in.raster.rows);
        int row = band * in.raster.rows + within % height + in.first_adding;
        if (!is_adding) row += in.num_adding;
        if (row >= p.tiles_m) row -= p.tiles_m;
        return {row, within / height};
    }
    __device__ __forceinline__ int tile_m(int tile) const {
        return (place(tile).m * C::kClusterCtas + rank) * C::kTileM;
    }
    __device__ __forceinline__ int tile_n(int tile) const { return place(tile).n * C::kTileN; }
};

template <typename C>
struct FusedReduceEpilogue : ScatterEpilogue<C> {
    struct Inputs : ScatterInputs {
        CUtensorMap residual_map;   // {n, own rows}
        CUtensorMap parts_maps[2];  // for even and for odd calls: {n, own rows, size}
    };
    struct Smem : SwizzledInput<C> {};
    using Scatter = ScatterEpilogue<C>;
    using Plain = typename Scatter::Base;
    const typename FusedReduceScheduler<C>::Inputs& order;
    Smem& s;

    template <typename K>
    __device__ __forceinline__ FusedReduceEpilogue(const K& k, int m, int n, int round)
        : Scatter(k, m, n, round), order(k.p.scheduler), s(k.s.epilogue) {}

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K& k) {
        init_input_barriers(k.s.epilogue);
    }

    __device__ __forceinline__ bool adds() const {
        const int row = this->m / (C::kTileM * C::kClusterCtas) - order.first_adding;
        return row >= 0 && row < order.num_adding;
    }

    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        wait();
        sums.clear();
        if (adds() && this->in.bias != nullptr) this->add_bias(sums);
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(Accumulators& sums) const {
        if (!adds()) return Scatter::finish(sums);
        const int count = this->all.peers.size;
#pragma unroll 1
        for (int i = 0; i < count; ++i) add_input<C>(s, sums, i);
        if (count % 2 != 0) skip_input(s, 1);
        Plain::finish(sums);
        this->publish(comm::this_epoch(this->all.peers, comm::kSumEpoch));
    }
};

// One thread: fetches the arrays of tiles that add parts, each as soon as the one before has been
// read: the residual, then the other ranks' parts in their order. A tile gets an even number of
// arrays, an empty one after an odd number, so that each tile begins with the same phase.
template <typename C, typename K>
__device__ __forceinline__ void fetch_parts(const K& k) {
    static_assert(C::kConsumers == 2);
    auto& [p, smem, at] = k;
    auto& s = smem.epilogue;
    const auto& in = p.epilogue;
    const comm::Peers& peers = in.peers;
    const auto hint = L2Policy::evict_first;
    const uint32_t epoch = comm::this_epoch(peers, comm::kSumEpoch);
    const CUtensorMap* parts = &in.parts_maps[epoch & 1];
    const int own = in.offsets[peers.rank];
    int phase = 1, group = 0;
    for (int tile = at.cluster; at.has(tile); tile += at.num_clusters, group ^= 1) {
        if (!at.adds(tile)) continue;
        const int column = at.tile_n(tile), row = at.tile_m(tile);
        uint64_t* full = &s.input_full[group];
#pragma unroll 1
        for (int index = 0; index < (peers.size + 1) / 2 * 2; ++index, phase ^= 1) {
            if (index == peers.size) {
                EmptyBarrier::wait(&s.input_empty, phase);
                FullBarrier::arrive(full);
                continue;
            }
            const int source = index <= peers.rank ? index - 1 : index;
            if (index > 0 && row < p.m) {  // a tile beyond all rows has no parts
                const int number = row / C::kTileM - own / C::kTileM;
                comm::wait_for(peers, source,
                               counter_at(peers, peers.rank, Counted::tiles, epoch, source, number),
                               p.tiles_n);
                comm::fence_proxies();  // bulk copies follow
            }
            EmptyBarrier::wait(&s.input_empty, phase);  // pairs with release_input()
            FullBarrier::arrive_and_expect(full, sizeof(s.input));
            fetch_boxes<C>(s, [&](auto* to, int offset) {
                const int from = column + offset;
                if (index == 0) {
                    load_box(&in.residual_map, full, hint, to, from, row - own);
                } else {
                    load_box(parts, full, hint, to, from, row - own, source);
                }
            });
        }
    }
}

template <typename C>
struct FusedReduceProducer : ProducerDefaults {
    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int thread) {
        DenseProducer<C>::run(k, thread);
        if (thread == 32) fetch_parts<C>(k);
        if (thread == 64) begin_sum(k);
    }
};

}  // namespace bytetx::gemm
