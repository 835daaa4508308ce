// Who brings the operands of a GEMM to shared memory.
//
// A producer has
//   Inputs, Smem             what the launch tells it; its own shared memory
//   kWaitsFirst              whether all threads wait for the kernel before, before any role begins
//   init_barriers(k)         one thread
//   run(k, thread)           the warps that do not multiply; thread: of them
//   end(k)                   all threads, when the CTA is done
// k is the Context of gemm/kernel.cuh. The producers of GEMMs over several GPUs are in comm/.
#pragma once

#include "common/launch.cuh"
#include "gemm/ring.cuh"
#include "gemm/schedulers.cuh"

namespace bytetx::gemm {

struct ProducerDefaults {
    struct Inputs {};
    struct Smem {};
    static constexpr bool kWaitsFirst = false;

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K&) {}
    template <typename K>
    static __device__ __forceinline__ void end(const K&) {}
};

// Rows of a tile from `row` on.
template <typename C, typename S>
__device__ __forceinline__ void fetch_a(const CUtensorMap* map, S& s, int stage, int k, int row) {
    const auto hint = L2Policy::evict_normal;
    load_box(map, &s.ring.full[stage], hint, s.stages.a(stage), k, row);
}

// A CTA's share of a stage's rows, which all CTAs of the cluster get.
template <typename C, typename S>
__device__ __forceinline__ void fetch_b(const Problem& p, S& s, int stage, int rank, int k,
                                        int row) {
    constexpr L2Policy hint = C::kIsForSmallM ? L2Policy::evict_normal : L2Policy::evict_last;
    if constexpr (C::kClusterCtas == 1) {
        load_box(&p.b, &s.ring.full[stage], hint, s.stages.b(stage), k, 0, 0, 0,
                 row / kPermutedRows);
    } else {
        constexpr int kRows = C::kTileN / C::kClusterCtas;
        static_assert(kRows % kPermutedRows == 0);
        constexpr uint16_t kAll = (1 << C::kClusterCtas) - 1;
        load_box_to(kAll, &p.b, &s.ring.full[stage], hint,
                    s.stages.b(stage) + rank * kRows * kBlockK, k, 0, 0, 0,
                    (row + rank * kRows) / kPermutedRows);
    }
}

// One thread. Weights are nobody's result: the first stages of them are under way while the kernel
// before still runs.
//
// fetch_weights(stage, k, n), fetch_rows(stage, k, m): a block of features from k on, of the tile
// that begins at column n and row m. on_fetched(tile, block): called when a block's fetches are
// under way.
template <typename C, typename K, typename Weights, typename Rows, typename OnFetched>
__device__ __forceinline__ void fetch_operands(const K& k, const Weights& fetch_weights,
                                               const Rows& fetch_rows,
                                               const OnFetched& on_fetched) {
    auto& [p, s, at] = k;
    // A loop of several tiles is long; where there is one, its latency counts.
    constexpr bool kIsPersistent = std::decay_t<decltype(at)>::kIsPersistent;
    constexpr int kUnroll = kIsPersistent ? 1 : 4;
    const Share blocks = at.k_blocks();
    const auto begin_stage = [&](int stage, int block, int n) {
        FullBarrier::arrive_and_expect(&s.ring.full[stage], s.stages.stage_bytes(p.stages));
        fetch_weights(stage, block * kBlockK, n);
    };
    const int early =  // blocks of the first tile
        at.has(at.cluster) ? min(s.stages.num_stages(p.stages), blocks.end - blocks.begin) : 0;
    prefetch_map(&p.a);
    for (int i = 0; i < early; ++i) begin_stage(i, blocks.begin + i, at.tile_n(at.cluster));
    wait_for_prior_kernel();
    auto ring = s.stages.first(p.stages);
    int num_fetched = 0;
    for (int tile = at.cluster; at.has(tile); tile += at.num_clusters) {
        const int m = at.tile_m(tile), n = at.tile_n(tile);
#pragma unroll kUnroll
        for (int block = blocks.begin; block < blocks.end; ++block, ++num_fetched, ring.advance()) {
            // The same; with a counter the kernel of one tile takes up to 11 registers more.
            const int number = kIsPersistent ? num_fetched : block - blocks.begin;
            if (number >= early) {
                // Pairs with release_stage().
                EmptyBarrier::wait(&s.ring.empty[ring.index], ring.phase ^ 1);
                begin_stage(ring.index, block, n);
            }
            fetch_rows(ring.index, block * kBlockK, m);
            on_fetched(tile, block);
        }
        if constexpr (!kIsPersistent) break;
    }
    // Until the other CTAs have released all stages: their signals must not reach the CTA that has
    // this one's place next.
    if constexpr (!kIsPersistent && C::kClusterCtas > 1) {
        for (int i = 0; i < s.stages.num_stages(p.stages); ++i, ring.advance()) {
            EmptyBarrier::wait(&s.ring.empty[ring.index], ring.phase ^ 1);
        }
    }
}

// Both operands by TMA: weights to all CTAs of a cluster, rows to one.
template <typename C, typename K, typename OnFetched>
__device__ __forceinline__ void fetch_dense_operands(const K& k, const OnFetched& on_fetched) {
    auto& [p, s, at] = k;
    const auto weights = [&](int stage, int feature, int n) {
        fetch_b<C>(p, s, stage, at.rank, feature, n);
    };
    const auto rows = [&](int stage, int feature, int m) {
        fetch_a<C>(&p.a, s, stage, feature, m);
    };
    fetch_operands<C>(k, weights, rows, on_fetched);
}

template <typename C>
struct DenseProducer : ProducerDefaults {
    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int thread) {
        if (thread == 0) fetch_dense_operands<C>(k, [](int, int) {});
    }
};

// One thread beside the operands': for each of the CTA's tiles the epilogue's tile input, strip by
// strip, each as soon as the one before has been read. Epilogue::fetch_input(k, full, tile, strip)
// issues the copies.
template <typename C, typename Epilogue, typename K>
__device__ __forceinline__ void fetch_tile_inputs(const K& k) {
    static_assert(C::kConsumers == 2);
    auto& [p, s, at] = k;
    int phase = 1, group = 0;
    for (int tile = at.cluster; at.has(tile); tile += at.num_clusters) {
        uint64_t* full = &s.epilogue.input_full[group];
        for (int strip = 0; strip < Epilogue::Smem::kStrips; ++strip, phase ^= 1) {
            EmptyBarrier::wait(&s.epilogue.input_empty, phase);  // pairs with release_input()
            FullBarrier::arrive_and_expect(full, sizeof(s.epilogue.input));
            Epilogue::fetch_input(k, full, tile, strip);
        }
        group ^= 1;
    }
}

// As DenseProducer, and the epilogue's tile inputs by a thread of their own. They wait for the
// first tile's first stages, which are needed sooner.
template <typename C, typename Epilogue>
struct PrefetchingProducer : ProducerDefaults {
    struct Smem {
        uint64_t has_begun;  // the first stages are under way
    };

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K& k) {
        EmptyBarrier::init(&k.s.producer.has_begun, 1);
    }

    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int thread) {
        auto& [p, s, at] = k;
        if (thread == 0) {
            const int last = min(C::kStages, p.num_k_blocks) - 1;
            fetch_dense_operands<C>(k, [&](int tile, int block) {
                if (tile != at.cluster || block != last) return;
                EmptyBarrier::arrive(&s.producer.has_begun);
            });
        }
        if (thread == 32) {
            wait_for_prior_kernel();
            EmptyBarrier::wait(&s.producer.has_begun, 0);
            fetch_tile_inputs<C, Epilogue>(k);
        }
    }
};

// A tile's blocks one after the other, where nothing is fetched before the kernel before has ended.
// fetch(stage, k): a block of features from k on.
template <typename C, typename K, typename Index, typename Fetch>
__device__ __forceinline__ void fetch_blocks(const K& k, Index& ring, const Fetch& fetch) {
    auto& [p, s, at] = k;
    for (int block = 0; block < p.num_k_blocks; ++block, ring.advance()) {
        EmptyBarrier::wait(&s.ring.empty[ring.index], ring.phase ^ 1);  // pairs with release_stage
        FullBarrier::arrive_and_expect(&s.ring.full[ring.index], C::kStageBytes);
        fetch(ring.index, block * kBlockK);
    }
}

// CTAs of a cluster that share rows: each fetches a part of a and sends it to all, and its own rows
// of b. Tile inputs as PrefetchingProducer's.
template <typename C, typename Epilogue>
struct SharedRowsProducer : ProducerDefaults {
    static constexpr bool kWaitsFirst = true;

    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int thread) {
        if (thread == 0) fetch_rows(k);
        if (thread == 32) fetch_tile_inputs<C, Epilogue>(k);
    }

  private:
    template <typename K>
    static __device__ __forceinline__ void fetch_rows(const K& k) {
        auto& [p, s, at] = k;
        constexpr int kRows = C::kTileM / C::kClusterCtas;
        constexpr uint16_t kAll = (1 << C::kClusterCtas) - 1;
        static_assert(kRows % 8 == 0);  // the period of the swizzle
        const auto a_hint = L2Policy::evict_normal;
        const auto b_hint = L2Policy::evict_last;
        auto ring = s.stages.first(p.stages);
        for (int tile = at.cluster; at.has(tile); tile += at.num_clusters) {
            const int m = at.tile_m(tile) + at.rank * kRows;
            fetch_blocks<C>(k, ring, [&](int stage, int feature) {
                uint64_t* full = &s.ring.full[stage];
                auto* part = s.stages.a(stage) + at.rank * kRows * kBlockK;
                load_box_to(kAll, &p.a, full, a_hint, part, feature, m);
                load_box(&p.b, full, b_hint, s.stages.b(stage), feature, 0, 0, 0,
                         at.tile_n(tile) / kPermutedRows);
            });
        }
    }
};

}  // namespace bytetx::gemm
