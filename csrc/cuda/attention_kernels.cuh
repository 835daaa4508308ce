// tile_kernel: a CTA of one warpgroup a tile of 64 rows and a head; its own first thread fetches.
// Several CTAs of an SM hide each other's waits. For short and middle-sized sequences, and for
// relative biases and soft caps.
#pragma once

#include "cuda/attention_store.cuh"

namespace bytetx::attention {

template <typename C>
struct TileSmem {
    alignas(1024) typename C::Element q[C::kQElements];
    alignas(1024) typename C::Element k[C::kStages][C::kKvElements];
    alignas(1024) typename C::Element v[C::kStages][C::kKvElements];
    int4 seen[128];  // bounds for each thread's two rows: registers are scarce
    uint64_t q_full, k_full[C::kStages], v_full[C::kStages];
    KeyPartsOf<C> parts;
};

template <typename C, int kMinCtas>
__global__ void __launch_bounds__(128, kMinCtas) tile_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *known_uniform(reinterpret_cast<TileSmem<C>*>(smem));
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
        fence_barrier_init();
    }
    __syncwarp();  // the whole warp may initialise, in the compiler's eyes; its first lane arrives
    wait_for_prior_kernel();
    const int used = *p.used_tiles;
    int4 entry = p.tiles[blockIdx.y];  // both trips to L2 at once
    const auto fetch = [&](int stage, int row) {
        if constexpr (C::kHasTree) row = s.parts.row_at(row);
        FullBarrier::arrive_and_expect(&s.k_full[stage], C::kKvBytes);
        load_tile<C, kN>(p.k, &s.k_full[stage], s.k[stage], kv_head, row);
        FullBarrier::arrive_and_expect(&s.v_full[stage], C::kKvBytes);
        load_tile<C, kN>(p.v, &s.v_full[stage], s.v[stage], kv_head, row);
    };
    RowTile<C> tile(p);
    tile.head = head;
    RingIndex<C::kStages> at;
    // One round for most: the grid has room for full tiles.
    for (int index = blockIdx.y, q_phase = 0; index < used; q_phase ^= 1) {
        const int base = uniform(entry.x), rows = uniform(entry.y);
        int begin = uniform(entry.z), end = uniform(entry.w);
        if (is_fetcher) {
            FullBarrier::arrive_and_expect(&s.q_full, C::kQElements * kElementBytes);
            load_tile<C, kTileRows>(p.q, &s.q_full, s.q, head, base);
        }
        if constexpr (C::kHasTree) {  // keys by their places
            if (is_fetcher)
                s.parts.fill(p.ancestors + index * kMaxAncestors, {begin, end}, p.window);
            __syncthreads();
            begin = 0;
            end = uniform(s.parts.place[s.parts.kOwn + 1]);
        }
        if (is_fetcher) {
            RingIndex<C::kStages> to = at;
            for (int i = 0; i < C::kStages; ++i, to.advance()) {
                if (begin + i * kN < end) fetch(to.index, begin + i * kN);
            }
        }
        tile.base = base;
        tile.num_rows = rows;
        int4& seen = s.seen[threadIdx.x];
        const auto keep_seen = [&] {
            seen = {tile.seen[0].x, tile.seen[0].y, tile.seen[1].x, tile.seen[1].y};
        };
        int part = -1;  // none before the first step
        if constexpr (C::kHasTree) {
            tile.clear();
        } else {
            tile.start(p.row_bounds + base, {begin, end});
            keep_seen();
        }
        const auto find = [&] {
            tile.seen[0] = {seen.x, seen.y};
            tile.seen[1] = {seen.z, seen.w};
        };
        if (q_phase == 0) __syncthreads();  // the barriers are initialised
        FullBarrier::wait(&s.q_full, q_phase);
        for (int first = begin; first < end; first += kN, at.advance()) {
            const int stage = at.index, phase = at.phase;
            FullBarrier::wait(&s.k_full[stage], phase);
            const auto wait_v = [&] { FullBarrier::wait(&s.v_full[stage], phase); };
            if constexpr (C::kHasTree) {
                if (const int now = uniform(s.parts.part_at(first)); now != part) {
                    part = now;
                    tile.find_seen(p.row_bounds + base, s.parts, part, first);
                    keep_seen();
                }
            }
            if (end - first <= kN / 2) {  // half the work for the last keys
                tile.template attend<kN / 2>(s.q, s.k[stage], s.v[stage], first, find, wait_v);
            } else {
                tile.template attend<kN>(s.q, s.k[stage], s.v[stage], first, find, wait_v);
            }
            const int next = first + C::kStages * kN;
            if (next < end) {
                __syncthreads();  // all warps have read the stage
                if (is_fetcher) fetch(stage, next);
            }
        }
        if constexpr (C::kHasTree) {
            store_rows<C>(tile, tile.num_rows, TreeTarget<C>{{p, base, head}, &s.parts});
        } else {
            store_tile(tile);
        }
        index += gridDim.y;
        if (index >= used) return;
        entry = p.tiles[index];
        __syncthreads();  // all warps have read queries, keys and values
    }
}

}  // namespace bytetx::attention
