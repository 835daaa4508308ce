// The compute warps of the decode kernel: keys and values through the warp's ring, rows against
// them.
#pragma once

#include "cuda/paged_decode_rows.cuh"

namespace bytetx::paged {

// The warp's place in the stream of keys of all its items, ahead of where it computes.
template <typename C>
struct Fetcher {
    using T = typename C::T;
    const DecodeParams& p;
    DecodeSmem<C>& s;
    int warp, lane, total;
    int index;                  // of the item
    RingIndex<kItemsAhead> at;  // where it is staged
    int round = -1;             // first key of the warps' next step; -1: before an item
    int first_key, first_visible, end_key, kv_head;

    __device__ Fetcher(const DecodeParams& params, DecodeSmem<C>& smem, int of_warp, int of_lane,
                       int num_items)
        : p(params), s(smem), warp(of_warp), lane(of_lane), total(num_items), index(blockIdx.x) {}

    __device__ void enter() {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const StagedItem& staged = s.staged[at.index];
        first_key = staged.item.first_key;
        first_visible = staged.item.first_visible;
        end_key = staged.item.end_key;
        kv_head = staged.kv_head;
        round = first_key;
    }

    // The slot of key + lane % 16, or -1 where no row sees it: its memory may hold anything.
    __device__ int slot(int key) const {
        const int own = key + lane % kStepKeys;
        if (own < first_visible || own >= end_key) return -1;
        const int step = (key - first_key) / kStepKeys;
        const bool is_staged = 1 << p.page_shift >= kStepKeys && step < kStagedSteps;
        const StagedItem& staged = s.staged[at.index];
        const int page =
            is_staged ? staged.pages[step]
                      : p.page_table[staged.item.sequence * p.max_pages + (own >> p.page_shift)];
        return (page << p.page_shift) | (own & ((1 << p.page_shift) - 1));
    }

    // Starts the copies of 16 keys and values into `stage`, a shared address. All warps take the
    // same number of steps, so that none runs further ahead of its own items than its ring is deep.
    __device__ void fetch(uint32_t stage) {
        if (index < total) {
            if (round < 0) enter();
            const int key = round + warp * kStepKeys;
            if (key < end_key) {
                const int own = slot(key);
#pragma unroll
                for (int i = 0; i < C::kCopies; ++i) {
                    const int row = (i * 32 + lane) / C::kPieces;
                    const int piece = (i * 32 + lane) % C::kPieces;
                    const int of_row = __shfl_sync(kFullMask, own, row);
                    const bool is_there = of_row >= 0 && piece * 8 < p.head_dim;
                    const int64_t from =
                        is_there
                            ? (int64_t{of_row} * p.num_kv_heads + kv_head) * p.head_dim + piece * 8
                            : 0;
                    const uint32_t to = stage + piece_offset<C::kDim>(row, piece);
                    copy_or_zero(to, static_cast<const T*>(p.k_cache) + from, is_there ? 16 : 0);
                    copy_or_zero(to + C::kTileBytes, static_cast<const T*>(p.v_cache) + from,
                                 is_there ? 16 : 0);
                }
            }
            round += kRoundKeys;
            if (round >= end_key) {
                index += gridDim.x;
                at.advance();
                round = -1;
            }
        }
        commit_copies();
    }
};

// The warp's sums, to the joining warp: eight rows a buffer.
template <typename C>
__device__ __forceinline__ void hand_over(DecodeSmem<C>& s, const RowUnit<C>& unit, int num_rows,
                                          RingIndex<kJoinBuffers>& at, int warp, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (num_rows <= kJoinRows * half) break;
        const float sum = quad_sum(unit.sum[half]);
        Barrier::wait(&s.join_empty[at.index], at.phase ^ 1);
        if (kJoinRows * half + lane / 4 < num_rows) {
            float* row = s.join[at.index][warp][lane / 4];
#pragma unroll
            for (int i = 0; i < C::kDim / 8; ++i) {
                *reinterpret_cast<float2*>(row + 8 * i + lane % 4 * 2) = {
                    unit.out[i][2 * half], unit.out[i][2 * half + 1]};
            }
            if (lane % 4 == 0) s.stats[at.index][warp][lane / 4] = {unit.top[half], sum};
        }
        __syncwarp();
        if (lane == 0) Barrier::arrive(&s.join_full[at.index]);
        at.advance();
    }
}

template <typename C>
__device__ __forceinline__ void compute(const DecodeParams& p, DecodeSmem<C>& s, int total,
                                        int warp, int lane) {
    const auto ring = static_cast<uint32_t>(__cvta_generic_to_shared(s.ring[warp]));
    constexpr uint32_t kStageBytes = 2 * C::kTileBytes;
    Fetcher<C> fetcher(p, s, warp, lane, total);
    for (int i = 0; i < C::kStages - 1; ++i) fetcher.fetch(ring + i * kStageBytes);
    RowUnit<C> unit;
    RingIndex<kItemsAhead> at;
    RingIndex<kJoinBuffers> join;
    int stage = 0;
    for (int index = blockIdx.x; index < total; index += gridDim.x, at.advance()) {
        const PagedItem& item = s.staged[at.index].item;  // the fetcher has waited for it
        const int end_key = item.end_key, num_rows = item.num_rows;
        unit.start(p, item, static_cast<uint32_t>(__cvta_generic_to_shared(s.q[at.index])), lane);
        for (int round = item.first_key; round < end_key; round += kRoundKeys) {
            wait_for_copies<C::kStages - 2>();
            __syncwarp();  // every lane's copies are there, and the stage before has been read
            const int free = stage == 0 ? C::kStages - 1 : stage - 1;
            fetcher.fetch(ring + free * kStageBytes);
            const int key = round + warp * kStepKeys;
            if (key < end_key) unit.attend(ring + stage * kStageBytes, key, p.scale, lane);
            stage = stage + 1 == C::kStages ? 0 : stage + 1;
        }
        hand_over(s, unit, num_rows, join, warp, lane);
        if (lane == 0) Barrier::arrive(&s.item_empty[at.index]);
    }
}

}  // namespace bytetx::paged
