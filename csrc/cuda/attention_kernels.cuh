// tile_kernel: one CTA of one warpgroup a tile of 64 rows and a head; its own first thread fetches.
// Several CTAs of an SM hide each other's waits. For short and middle-sized sequences, and for
// relative biases.
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
    const bool is_fetcher = threadIdx.x == 0;
    release_next_kernel();
    if (is_fetcher) {
        FullBarrier::init(&s.q_full, 1);
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.k_full[i], 1);
            FullBarrier::init(&s.v_full[i], 1);
        }
        cutlass::arch::fence_barrier_init();
    }
    wait_for_prior_kernel();
    if (static_cast<int>(blockIdx.y) >= *p.used_tiles) return;
    const int4 entry = p.tiles[blockIdx.y];
    const int base = uniform(entry.x), rows = uniform(entry.y);
    const int begin = uniform(entry.z), end = uniform(entry.w);
    if (is_fetcher) {
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
    tile.base = base;
    tile.num_rows = rows;
    tile.head = head;
    tile.start(p.row_bounds + base, end);
    __syncthreads();  // the barriers are initialised
    FullBarrier::wait(&s.q_full, 0);
    int stage = 0, phase = 0;
    for (int first = begin; first < end; first += kN) {
        FullBarrier::wait(&s.k_full[stage], phase);
        const auto wait_v = [&] { FullBarrier::wait(&s.v_full[stage], phase); };
        if (end - first <= kN / 2) {  // half the work for the last keys
            tile.template attend<kN / 2>(s.q, s.k[stage], s.v[stage], first, wait_v);
        } else {
            tile.template attend<kN>(s.q, s.k[stage], s.v[stage], first, wait_v);
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

}  // namespace bytetx::attention
