// The two attention kernels, one template each.
//
// tile_kernel: one CTA of one warpgroup a tile of 64 rows and a head; its own first thread fetches.
// Several CTAs of an SM hide each other's waits. For short and middle-sized sequences.
//
// pipeline_kernel: persistent; one producer warp fetches, kNumWarpgroups warpgroups of 64 rows each
// share keys and values, so that long sequences cost a half or a third of the L2 traffic.
#pragma once

#include "cuda/attention_store.cuh"

namespace bytetx::attention {

template <typename C>
struct TileSmem {
    alignas(1024) typename C::Element q[C::kQElements];  // the result's staging at the end
    alignas(1024) typename C::Element k[C::kStages][C::kKvElements];
    alignas(1024) typename C::Element v[C::kStages][C::kKvElements];
    uint64_t q_full, k_full[C::kStages], v_full[C::kStages];
};

template <typename C, int kMinCtas>
__global__ void __launch_bounds__(128, kMinCtas) tile_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<TileSmem<C>*>(smem);
    constexpr int kN = C::kBlockN;
    const int head = blockIdx.x, kv_head = head / p.group;
    if (static_cast<int>(blockIdx.y) >= *p.used_tiles) return;
    const int4 entry = p.tiles[blockIdx.y];
    const int base = uniform(entry.x), rows = uniform(entry.y);
    const int begin = uniform(entry.z), end = uniform(entry.w);
    const bool is_fetcher = threadIdx.x == 0;
    if (is_fetcher) {
        FullBarrier::init(&s.q_full, 1);
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.k_full[i], 1);
            FullBarrier::init(&s.v_full[i], 1);
        }
        cutlass::arch::fence_barrier_init();
        FullBarrier::arrive_and_expect_tx(&s.q_full, C::kQElements * kElementBytes);
        load_tile<C, kTileRows>(p.q, &s.q_full, s.q, head, base);
    }
    const int num_tiles = (end - begin + kN - 1) / kN;
    const auto fetch = [&](int stage, int row) {
        FullBarrier::arrive_and_expect_tx(&s.k_full[stage], C::kKvBytes);
        load_tile<C, kN>(p.k, &s.k_full[stage], s.k[stage], kv_head, row);
        FullBarrier::arrive_and_expect_tx(&s.v_full[stage], C::kKvBytes);
        load_tile<C, kN>(p.v, &s.v_full[stage], s.v[stage], kv_head, row);
    };
    if (is_fetcher) {
        for (int i = 0; i < min(C::kStages, num_tiles); ++i) fetch(i, begin + i * kN);
    }
    RowTile<C> tile{p, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) % 32};
    tile.start(p.row_bounds + base, base, rows, head, end);
    __syncthreads();  // the barriers are initialised
    FullBarrier::wait(&s.q_full, 0);
    int stage = 0, phase = 0;
    for (int first = begin; first < end; first += kN) {
        FullBarrier::wait(&s.k_full[stage], phase);
        const auto wait_v = [&] { FullBarrier::wait(&s.v_full[stage], phase); };
        if (end - first <= kN / 2) {  // half the work for the last keys
            tile.template attend<kN / 2>(s.q, s.k[stage], s.v[stage], first, [] {}, wait_v);
        } else {
            tile.template attend<kN>(s.q, s.k[stage], s.v[stage], first, [] {}, wait_v);
        }
        const int next = first + C::kStages * kN;
        if (next < end) {
            __syncthreads();  // all warps have read the stage
            if (is_fetcher) fetch(stage, next);
        }
        if (++stage == C::kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
    store_tile(tile, s.q);
}

// What a consumer must know of an item, besides its queries.
struct Item {
    int base, rows, begin, end;
    int head;
};

template <typename C>
struct PipelineSmem {
    alignas(1024) typename C::Element q[C::kQStages][C::kNumWarpgroups * C::kQElements];
    alignas(1024) typename C::Element k[C::kStages][C::kKvElements];
    alignas(1024) typename C::Element v[C::kStages][C::kKvElements];
    // From an even row on, for a bulk copy starts at 16 bytes.
    alignas(128) int2 row_bounds[C::kQStages][C::kNumWarpgroups * kTileRows + 2];
    alignas(16) Item items[C::kQStages];
    uint64_t q_full[C::kQStages], q_empty[C::kQStages];
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
};

template <typename C>
__device__ __forceinline__ void produce(const Params& p, PipelineSmem<C>& s, int num_items) {
    constexpr int kRows = C::kNumWarpgroups * kTileRows;
    constexpr int kBoundsBytes = (kRows + 2) * sizeof(int2);
    RingIndex<C::kQStages> q;
    RingIndex<C::kStages> kv;
    int item = blockIdx.x;
    int4 next = item < num_items ? p.tiles[item / p.num_heads] : int4{};
    for (; item < num_items; item += gridDim.x) {
        const Item now{next.x, next.y, next.z, next.w, item % p.num_heads};
        const int kv_head = now.head / p.group;
        if (item + gridDim.x < num_items) next = p.tiles[(item + gridDim.x) / p.num_heads];
        EmptyBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);  // pairs with consume's end of item
        s.items[q.index] = now;  // before the arrival below, which releases it
        uint64_t* full = &s.q_full[q.index];
        FullBarrier::arrive_and_expect_tx(
            full, C::kNumWarpgroups * C::kQElements * kElementBytes + kBoundsBytes);
#pragma unroll
        for (int w = 0; w < C::kNumWarpgroups; ++w) {
            load_tile<C, kTileRows>(p.q, full, s.q[q.index] + w * C::kQElements, now.head,
                                    now.base + w * kTileRows);
        }
        cute::SM90_BULK_COPY_G2S::copy(p.row_bounds + now.base / 2 * 2, full, s.row_bounds[q.index],
                                       kBoundsBytes);
        q.advance();
        for (int row = now.begin; row < now.end; row += C::kBlockN) {
            EmptyBarrier::wait(&s.k_empty[kv.index], kv.phase ^ 1);
            FullBarrier::arrive_and_expect_tx(&s.k_full[kv.index], C::kKvBytes);
            load_tile<C, C::kBlockN>(p.k, &s.k_full[kv.index], s.k[kv.index], kv_head, row);
            EmptyBarrier::wait(&s.v_empty[kv.index], kv.phase ^ 1);
            FullBarrier::arrive_and_expect_tx(&s.v_full[kv.index], C::kKvBytes);
            load_tile<C, C::kBlockN>(p.v, &s.v_full[kv.index], s.v[kv.index], kv_head, row);
            kv.advance();
        }
    }
}

template <typename C>
__device__ __forceinline__ void consume(const Params& p, PipelineSmem<C>& s, int num_items) {
    constexpr int kN = C::kBlockN;
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
    RowTile<C> tile{p, static_cast<int>(threadIdx.x) % 128, static_cast<int>(threadIdx.x) % 32};
    // Each warp arrives for itself: one arrival a warpgroup would need a barrier of its four warps.
    const auto release = [&](uint64_t* barrier) {
        __syncwarp();
        if (tile.lane == 0) EmptyBarrier::arrive(barrier);
    };
    RingIndex<C::kQStages> q;
    RingIndex<C::kStages> kv;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        FullBarrier::wait(&s.q_full[q.index], q.phase);
        const Item now = s.items[q.index];
        const int base = uniform(now.base) + warpgroup * kTileRows;
        const int end = uniform(now.end);
        const int2* sequences = s.row_bounds[q.index] + base % 2 + warpgroup * kTileRows;
        tile.start(sequences, base, uniform(now.rows) - warpgroup * kTileRows, uniform(now.head),
                   end);
        const int2 own = tile.own_keys(sequences);
        auto* q_tile = s.q[q.index] + warpgroup * C::kQElements;
        for (int first = uniform(now.begin); first < end; first += kN, kv.advance()) {
            const int stage = kv.index, phase = kv.phase;
            FullBarrier::wait(&s.k_full[stage], phase);
            const auto wait_v = [&] { FullBarrier::wait(&s.v_full[stage], phase); };
            if (first + kN <= own.x || first >= own.y) {  // another warpgroup's keys
                release(&s.k_empty[stage]);
                wait_v();
                release(&s.v_empty[stage]);
                continue;
            }
            const auto on_scores = [&] { release(&s.k_empty[stage]); };
            if (own.y - first <= kN / 2) {
                tile.template attend<kN / 2>(q_tile, s.k[stage], s.v[stage], first, on_scores,
                                             wait_v);
            } else {
                tile.template attend<kN>(q_tile, s.k[stage], s.v[stage], first, on_scores, wait_v);
            }
            release(&s.v_empty[stage]);
        }
        store_tile(tile, q_tile);
        cutlass::arch::fence_view_async_shared();  // the staging above, before TMA writes there
        release(&s.q_empty[q.index]);
        q.advance();
    }
}

template <typename C, int kMinCtas>
__global__ void __launch_bounds__(128 * C::kNumWarpgroups + C::kProducerThreads, kMinCtas)
    pipeline_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<PipelineSmem<C>*>(smem);
    constexpr int kConsumerWarps = 4 * C::kNumWarpgroups;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kQStages; ++i) {
            FullBarrier::init(&s.q_full[i], 1);
            EmptyBarrier::init(&s.q_empty[i], kConsumerWarps);
        }
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.k_full[i], 1);
            FullBarrier::init(&s.v_full[i], 1);
            EmptyBarrier::init(&s.k_empty[i], kConsumerWarps);
            EmptyBarrier::init(&s.v_empty[i], kConsumerWarps);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const int num_items = *p.used_tiles * p.num_heads;
    if (uniform(static_cast<int>(threadIdx.x) / 128) == C::kNumWarpgroups) {
        if constexpr (C::kConsumerRegisters > 0) {
            cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        }
        if (threadIdx.x % 128 == 0) produce<C>(p, s, num_items);
    } else {
        if constexpr (C::kConsumerRegisters > 0) {
            cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        }
        consume<C>(p, s, num_items);
    }
}

}  // namespace bytetx::attention
