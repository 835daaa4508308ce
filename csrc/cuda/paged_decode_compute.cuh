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
    int ahead = warp;  // steps from the item's first one to the warp's next one
    for (OwnItems items; items.current < total; items.advance(), at.advance(), join.advance()) {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const PagedItem& item = s.staged[at.index].item;
        const int num_rows = item.num_rows, num_steps = item.num_steps();
        const UnitRows rows{p, item, s.staged[at.index].kv_head};
        unit.start(p, item, shared_address(s.q[at.index]), lane);
        for (; ahead < num_steps; ahead += kComputeWarps) {
            const int key = item.first_key + ahead * kStepKeys;
            const auto take = [&](int half) {
                Barrier::wait(&s.full[stage.index][half], stage.phase);
                return shared_address(s.ring[stage.index][half]);
            };
            const auto give_back = [&](int half) { Barrier::arrive(&s.empty[stage.index][half]); };
            unit.attend(take, give_back, rows, key, lane);
            stage.advance(kComputeWarps);
        }
        ahead -= num_steps;
        Barrier::arrive(&s.item_empty[at.index]);
        Barrier::wait(&s.join_empty, join.phase ^ 1);
        unit.template store<C::kSumStride>(s.join[warp][0], s.stats[warp], num_rows, lane);
        Barrier::arrive(&s.join_full);
    }
}

}  // namespace bytetx::paged
