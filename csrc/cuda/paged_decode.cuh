// Attention of few rows over many paged keys: the kernel of decode rows.
//
// An item of the plan is all keys of one sequence, chunk after chunk, or one chunk of a long
// sequence. One CTA reads it for one key head, for up to 16 rows: the query heads that share the
// key head. Eight warps are specialised, so that no wait for memory delays the stream of keys. When
// memory is saturated, every dependent load costs microseconds: with all work in the four compute
// warps, items of 256 keys ran at 0.41 of the copy rate, most of it waits at the end of an item
// (H200, 2026-11-21).
//
//   fetch      two warps, one for keys and one for values: steps of 16 keys of item after item,
//              into a ring of stages that continues into the next item (cp.async on an mbarrier)
//   scout      one or two items ahead: loads the item's record and its queries to shared memory
//   compute    four warps take steps round-robin, | w0 | w1 | w2 | w3 | w0 | w1 | ..., each with
//              its own softmax, which begins anew with every chunk
//   join       adds the four warps' sums of a chunk, joins them to those of the chunks before it,
//              in the order of the keys, and writes the item's; behind the last chunk of a sequence
//              that several CTAs have, joins all of them in the same order
//
// Early read: if the kernel before wrote only q and this step's rows (early_read), this kernel
// reads the plan and older keys before that kernel has ended. That kernel must itself have waited
// for the kernels before it when it released this one.
//
// Beside tiles (beside_tiles): the kernel before is that of the same step's prefill tiles, which
// has waited for all before it when it releases this one, and of which this one reads nothing. So
// it waits for it only at the end, in one CTA. Its CTAs take the SMs that tiles leave, and when
// those are done, theirs.
#pragma once

#include "cuda/paged_decode_compute.cuh"
#include "cuda/paged_decode_fetch.cuh"
#include "cuda/paged_decode_join.cuh"

namespace bytetx::paged {

// Rows of C::kRows, zeros where there is no row.
template <typename C>
__device__ __forceinline__ void stage_queries(const DecodeParams& p, const PagedItem& item,
                                              int kv_head, uint8_t* to, int lane) {
    using T = typename C::T;
#pragma unroll
    for (int i = 0; i < C::kRows * C::kQPieces / 32; ++i) {
        const int row = (i * 32 + lane) / C::kQPieces, piece = (i * 32 + lane) % C::kQPieces;
        uint4 words{};
        if (row < item.num_rows && piece * 8 < p.head_dim) {
            words = __ldcg(reinterpret_cast<const uint4*>(
                static_cast<const T*>(p.q) + row_address(p, item, kv_head, row, p.q_stride) +
                piece * 8));
        }
        *reinterpret_cast<uint4*>(to + C::q_offset(row, piece)) = words;
    }
}

template <typename C>
__device__ __forceinline__ void scout(const DecodeParams& p, DecodeSmem<C>& s, int total, int next,
                                      int lane) {
    constexpr int kInts = sizeof(PagedItem) / sizeof(int);
    RingIndex<kItemsAhead> at;
    if (p.early_read != 0) wait_for_prior_kernel();
    for (OwnItems items; items.current < total; items.advance(), at.advance()) {
        StagedItem& staged = s.staged[at.index];
        const int own = next, kv_head = items.current % p.num_kv_heads;
        if (items.next() < total) next = load_record(p, items.next(), lane);
        Barrier::wait(&s.item_empty[at.index], at.phase ^ 1);
        if (lane < kInts) reinterpret_cast<int*>(&staged.item)[lane] = own;
        if (lane == 0) staged.kv_head = kv_head;
        __syncwarp();
        stage_queries<C>(p, staged.item, kv_head, s.q[at.index], lane);
        Barrier::arrive(&s.item_full[at.index]);
    }
}

template <typename C>
__device__ __forceinline__ void init_barriers(DecodeSmem<C>& s) {
    for (int i = 0; i < C::kStages; ++i) {
        for (int half = 0; half < 2; ++half) {
            Barrier::init(&s.full[i][half], 32);
            Barrier::init(&s.empty[i][half], 32);
        }
    }
    for (int i = 0; i < kItemsAhead; ++i) {
        Barrier::init(&s.item_full[i], 32);
        Barrier::init(&s.item_empty[i], 32 * (kComputeWarps + 1));
    }
    Barrier::init(&s.join_full, 32 * kComputeWarps);
    Barrier::init(&s.join_empty, 32);
    fence_barrier_init();
}

template <typename C>
__global__ void __launch_bounds__(kDecodeThreads, C::kMinCtas)
    decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    auto& s = *reinterpret_cast<DecodeSmem<C>*>(smem);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) init_barriers(s);
    __syncthreads();
    if (p.early_read == 0 && !p.beside_tiles) wait_for_prior_kernel();
    const int record = load_record(p, blockIdx.x, lane);  // beside their number: some are cleared
    const int total = num_items(p);
    if (warp == kFetchWarp || warp == kFetchWarp + 1) {
        Fetcher<C>(p, s, warp - kFetchWarp, lane, total).run(record);
    } else if (warp == kScoutWarp) {
        scout(p, s, total, record, lane);
    } else {
        if (p.early_read != 0) wait_for_prior_kernel();
        if (warp == kJoinWarp) {
            join(p, s, total, lane);
        } else {
            compute(p, s, total, warp, lane);
        }
    }
}

}  // namespace bytetx::paged
