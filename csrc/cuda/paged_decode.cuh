// Attention of few rows over many paged keys: the kernel of decode rows.
//
// An item of the plan is a chunk of one sequence's keys, read for one key head by one CTA, for up
// to 16 rows: the query heads that share the key head. Six warps, each with one duty, so that no
// wait for memory stands in the way of the stream of keys. Under a saturated memory every dependent
// load costs microseconds: with all duties in the four compute warps, items of 256 keys ran at 0.41
// of the copy rate, most of it waits at their ends (H200, 2026-11-21).
//
//   scout      an item or two ahead: the item's record, its queries and pages, to shared memory
//   compute    four warps take 16 keys in turn, | w0 | w1 | w2 | w3 | w0 | w1 | ..., each through a
//              ring of its own (cp.async, no barrier but the warp's) and with a softmax of its own;
//              rings run on into the next item
//   join       adds the four warps' sums, writes them, and where it finishes a sequence's last
//              chunk, joins all chunks in the order of the keys: who is last changes no bit
#pragma once

#include "cuda/paged_decode_compute.cuh"
#include "cuda/paged_decode_join.cuh"

namespace bytetx::paged {

template <typename C>
__device__ __forceinline__ void stage_queries(const DecodeParams& p, const PagedItem& item,
                                              int kv_head, uint8_t* to, int lane) {
    using T = typename C::T;
#pragma unroll
    for (int i = 0; i < C::kCopies; ++i) {
        const int row = (i * 32 + lane) / C::kPieces, piece = (i * 32 + lane) % C::kPieces;
        uint4 words{};
        if (row < item.num_rows && piece * 8 < p.head_dim) {
            words = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) +
                                                    row_address(p, item, kv_head, row, p.q_stride) +
                                                    piece * 8);
        }
        *reinterpret_cast<uint4*>(to + piece_offset<C::kDim>(row, piece)) = words;
    }
}

template <typename C>
__device__ __forceinline__ void scout(const DecodeParams& p, DecodeSmem<C>& s, int lane) {
    constexpr int kInts = sizeof(PagedItem) / sizeof(int);
    const auto load = [&](int index) {  // an int a lane
        const auto* item = reinterpret_cast<const int*>(p.items + index / p.num_kv_heads);
        return lane < kInts ? item[lane] : 0;
    };
    RingIndex<kItemsAhead> at;
    int next = load(blockIdx.x);  // the plan has room for it, whether or not it is an item
    const int total = num_items(p);
    for (int index = blockIdx.x; index < total; index += gridDim.x, at.advance()) {
        StagedItem& staged = s.staged[at.index];
        const int own = next;
        if (index + gridDim.x < total) next = load(index + gridDim.x);
        Barrier::wait(&s.item_empty[at.index], at.phase ^ 1);
        if (lane < kInts) reinterpret_cast<int*>(&staged.item)[lane] = own;
        if (lane == 0) staged.kv_head = index % p.num_kv_heads;
        __syncwarp();
        const PagedItem item = staged.item;
        const int64_t table = item.sequence * p.max_pages;
        const int num_steps = (item.end_key - item.first_key + kStepKeys - 1) / kStepKeys;
        for (int step = lane; step < min(num_steps, kStagedSteps); step += 32) {
            const int key = max(item.first_key + step * kStepKeys, item.first_visible);
            staged.pages[step] = p.page_table[table + (key >> p.page_shift)];
        }
        stage_queries<C>(p, item, index % p.num_kv_heads, s.q[at.index], lane);
        __syncwarp();
        if (lane == 0) Barrier::arrive(&s.item_full[at.index]);
    }
}

template <typename C>
__global__ void __launch_bounds__(kDecodeThreads, C::kMinCtas)
    decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    auto& s = *reinterpret_cast<DecodeSmem<C>*>(smem);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kItemsAhead; ++i) {
            Barrier::init(&s.item_full[i], 1);
            Barrier::init(&s.item_empty[i], kComputeWarps + 1);
        }
        for (int i = 0; i < kJoinBuffers; ++i) {
            Barrier::init(&s.join_full[i], kComputeWarps);
            Barrier::init(&s.join_empty[i], 1);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_prior_kernel();
    release_next_kernel();
    if (warp == kScoutWarp) {
        scout(p, s, lane);
    } else if (warp == kJoinWarp) {
        join(p, s, num_items(p), lane);
    } else {
        compute(p, s, num_items(p), warp, lane);
    }
}

}  // namespace bytetx::paged
