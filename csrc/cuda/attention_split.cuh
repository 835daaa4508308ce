// split_kernel: one CTA a tile of 64 rows and a head, whose warpgroups take the steps of keys in
// turn and join their results at the end. For batches of so few tiles that most of the GPU would
// idle while one warpgroup a tile walks all keys: the time is then the latency of its steps (one
// sequence of 512 tokens, 12 heads of 64, f16: 7.0 us a call against 10.3 by tile_kernel, of 128
// tokens the same, which are two steps; H200, 2026-11-21).
#pragma once

#include "cuda/attention_store.cuh"

namespace bytetx::attention {

template <typename C>
struct SplitSmem {
    // A warpgroup's keys and values, and at the end its sums, which the first warpgroup joins: not
    // in place of the keys, which other warps may still read.
    struct alignas(1024) Share {
        typename C::Element k[C::kStages][C::kKvElements];
        typename C::Element v[C::kStages][C::kKvElements];
        float out[C::kDim / 2][128];
    };
    alignas(1024) typename C::Element q[C::kQElements];
    Share shares[C::kNumWarpgroups];
    SoftmaxState states[C::kNumWarpgroups][128][2];  // two rows a thread
    uint64_t q_full;
    uint64_t k_full[C::kNumWarpgroups][C::kStages], v_full[C::kNumWarpgroups][C::kStages];
};

// Adds up what the warpgroups found, relative to the largest maximum of each row.
template <typename C>
__device__ __forceinline__ void join(RowTile<C>& tile, const SplitSmem<C>& s) {
    SoftmaxState most[2] = {tile.state[0], tile.state[1]};
#pragma unroll
    for (int w = 1; w < C::kNumWarpgroups; ++w) {
        most[0].cover(s.states[w][tile.tid][0]);
        most[1].cover(s.states[w][tile.tid][1]);
    }
    float factor[2] = {tile.state[0].raise(most[0].max), tile.state[1].raise(most[1].max)};
    tile.rescale(factor);
#pragma unroll
    for (int w = 1; w < C::kNumWarpgroups; ++w) {
        factor[0] = tile.state[0].add(s.states[w][tile.tid][0]);
        factor[1] = tile.state[1].add(s.states[w][tile.tid][1]);
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) {
            tile.out(i) += s.shares[w].out[i][tile.tid] * factor[(i / 2) % 2];
        }
    }
}

template <typename C>
__global__ void __launch_bounds__(128 * C::kNumWarpgroups, 1)
    split_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<SplitSmem<C>*>(smem);
    constexpr int kN = C::kBlockN, kStride = C::kNumWarpgroups * kN;
    const int head = blockIdx.x, kv_head = head / p.group;
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    auto& own = s.shares[warpgroup];
    release_next_kernel();
    if (thread == 0) {
        if (warpgroup == 0) FullBarrier::init(&s.q_full, 1);
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.k_full[warpgroup][i], 1);
            FullBarrier::init(&s.v_full[warpgroup][i], 1);
        }
        fence_barrier_init();
    }
    __syncwarp();  // as in tile_kernel
    wait_for_prior_kernel();
    const int used = *p.used_tiles;
    const int4 entry = p.tiles[blockIdx.y];  // both trips to L2 at once
    if (static_cast<int>(blockIdx.y) >= used) return;
    const int base = uniform(entry.x), rows = uniform(entry.y);
    const int begin = uniform(entry.z) + warpgroup * kN, end = uniform(entry.w);
    if (threadIdx.x == 0) {
        FullBarrier::arrive_and_expect(&s.q_full, C::kQElements * kElementBytes);
        load_tile<C, kTileRows>(p.q, &s.q_full, s.q, head, base);
    }
    const auto fetch = [&](int stage, int row) {
        if (row >= end) return;
        uint64_t *k_full = &s.k_full[warpgroup][stage], *v_full = &s.v_full[warpgroup][stage];
        FullBarrier::arrive_and_expect(k_full, C::kKvBytes);
        load_tile<C, kN>(p.k, k_full, own.k[stage], kv_head, row);
        FullBarrier::arrive_and_expect(v_full, C::kKvBytes);
        load_tile<C, kN>(p.v, v_full, own.v[stage], kv_head, row);
    };
    if (thread == 0) {
        for (int i = 0; i < C::kStages; ++i) fetch(i, begin + i * kStride);
    }
    RowTile<C> tile(p);
    tile.base = base;
    tile.num_rows = rows;
    tile.head = head;
    tile.start(p.row_bounds + base, {uniform(entry.z), end});
    __syncthreads();  // the barriers are initialised
    FullBarrier::wait(&s.q_full, 0);
    RingIndex<C::kStages> at;
    for (int first = begin; first < end; first += kStride, at.advance()) {
        FullBarrier::wait(&s.k_full[warpgroup][at.index], at.phase);
        const auto wait_v = [&] { FullBarrier::wait(&s.v_full[warpgroup][at.index], at.phase); };
        const auto *k = own.k[at.index], *v = own.v[at.index];
        if (end - first <= kN / 2) {  // half the work for the last keys
            tile.template attend<kN / 2>(s.q, k, v, first, [] {}, wait_v);
        } else {
            tile.template attend<kN>(s.q, k, v, first, [] {}, wait_v);
        }
        if (first + kStride >= end) break;
        sync_threads_of(128, warpgroup);  // the four warps have read the stage
        if (thread == 0) fetch(at.index, first + C::kStages * kStride);
    }
    if (warpgroup > 0) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) own.out[i][thread] = tile.out(i);
        s.states[warpgroup][thread][0] = tile.state[0];
        s.states[warpgroup][thread][1] = tile.state[1];
    }
    __syncthreads();
    if (warpgroup > 0) return;
    join(tile, s);
    store_tile(tile);
}

}  // namespace bytetx::attention
