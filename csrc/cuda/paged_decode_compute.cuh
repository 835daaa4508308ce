// The compute warps of the decode kernel: rows against the keys and values of the ring.
#pragma once

#include "cuda/paged_decode_rows.cuh"

namespace bytetx::paged {

template <typename C>
__device__ __forceinline__ void compute(const DecodeParams& p, DecodeSmem<C>& s, int total,
                                        int warp, int lane) {
    ColumnUnit<C> unit;
    RingIndex<kItemsAhead> at;
    RingIndex<1> join;
    RingIndex<C::kStages> stage;
    stage.advance(warp);
    int ahead = warp;  // stages from the chunk's first one to the warp's next one
    for (OwnItems items; items.current < total; items.advance(), at.advance()) {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const PagedItem& item = s.staged[at.index].item;
        const UnitRows rows{p, item, s.staged[at.index].kv_head};
        for (int first = item.first_key; first < item.end_key; first += item.chunk_keys) {
            const int end = item.chunk_end(first), num_stages = C::num_stages(end - first);
            unit.start(p, item, shared_address(s.q[at.index]), lane);
            for (; ahead < num_stages; ahead += kComputeWarps) {
                const int key = first + ahead * C::kStageKeys;
#pragma unroll 1
                for (int step = 0; step < C::kStageSteps; ++step) {
                    const int own = key + step * kStepKeys;
                    const bool is_last =
                        step + 1 == C::kStageSteps || own + kStepKeys >= end;  // in the stage
                    const auto take = [&](int half) {
                        if (step == 0) Barrier::wait(&s.full[stage.index][half], stage.phase);
                        return shared_address(s.ring[stage.index][half]) + step * C::kHalfBytes;
                    };
                    const auto give_back = [&](int half) {
                        if (is_last) Barrier::arrive(&s.empty[stage.index][half]);
                    };
                    unit.attend(take, give_back, rows, own, lane);
                    if (is_last) break;
                }
                stage.advance(kComputeWarps);
            }
            ahead -= num_stages;
            Barrier::wait(&s.join_empty, join.phase ^ 1);
            unit.template store<C::kSumStride>(s.join[warp][0], s.states[warp], item.num_rows,
                                               lane);
            Barrier::arrive(&s.join_full);
            join.advance();
        }
        Barrier::arrive(&s.item_empty[at.index]);
    }
}

}  // namespace bytetx::paged
