// Packed rows as a source of pipeline_kernel: tiles that take no notice of where sequences begin,
// from the plan of attention_plan.cu; queries, keys and values by TMA.
#pragma once

#include "cuda/attention_pipeline.cuh"
#include "cuda/attention_tile.cuh"

namespace bytetx::attention {

template <typename C>
struct PackedSource {
    using T = typename C::Element;
    using Params = attention::Params;
    static constexpr int kProducerWarps = 1;
    static constexpr bool kThreadsCopy = false;
    static constexpr int kRows = C::kNumWarpgroups * kTileRows;

    struct Item {
        int base, rows, begin, end;
        int head;

        __device__ __forceinline__ bool is_any() const { return rows > 0; }
        __device__ __forceinline__ Item uniform() const {
            return {bytetx::uniform(base), bytetx::uniform(rows), bytetx::uniform(begin),
                    bytetx::uniform(end), bytetx::uniform(head)};
        }
    };
    struct Slot {
        alignas(128) int2 row_bounds[kRows + 2];  // from an even row: a bulk copy's are 16 bytes
        alignas(16) Item item;
    };
    const Params& p;

    __device__ __forceinline__ explicit PackedSource(const Params& params) : p(params) {}

    __device__ __forceinline__ int num_items() const { return *p.used_tiles * p.num_heads; }
    __device__ __forceinline__ Counters& counters() const { return *p.counters; }
    static __device__ __forceinline__ bool shares_gpu() { return false; }
    static __device__ __forceinline__ int num_ctas() { return static_cast<int>(gridDim.x); }
    __device__ __forceinline__ int share(int value, Slot&) const { return bytetx::uniform(value); }

    __device__ __forceinline__ Item read_item(int index) const {
        const int4 tile = p.tiles[index / p.num_heads];
        return {tile.x, tile.y, tile.z, tile.w, index % p.num_heads};
    }

    __device__ __forceinline__ void fetch_q(T* q, Slot& slot, uint64_t* full,
                                            const Item& item) const {
        constexpr int kBoundsBytes = sizeof(slot.row_bounds);
        FullBarrier::arrive_and_expect(
            full, C::kNumWarpgroups * C::kQElements * kElementBytes + kBoundsBytes);
#pragma unroll
        for (int w = 0; w < C::kNumWarpgroups; ++w) {
            load_tile<C, kTileRows>(p.q, full, q + w * C::kQElements, item.head,
                                    item.base + w * kTileRows);
        }
        load_bytes(p.row_bounds + item.base / 2 * 2, full, slot.row_bounds, kBoundsBytes);
    }

    __device__ __forceinline__ void start_keys(const Item&, int) const {}

    __device__ __forceinline__ void fetch_kv(T* k, T* v, uint64_t* full, const Item& item, int row,
                                             int thread) const {
        if (thread != 0) return;
        FullBarrier::arrive_and_expect(full, 2 * C::kKvBytes);
        load_tile<C, C::kBlockN>(p.k, full, k, item.head / p.group, row);
        load_tile<C, C::kBlockN>(p.v, full, v, item.head / p.group, row);
    }

    __device__ __forceinline__ int num_rows(const Item& item, int warpgroup) const {
        return item.rows - warpgroup * kTileRows;
    }
    __device__ __forceinline__ int2 bounds(const Slot& slot, const Item& item, int warpgroup,
                                           int row, int) const {
        const int in_tile = warpgroup * kTileRows + row;
        return key_bounds(p, slot.row_bounds[item.base % 2 + in_tile], item.base + in_tile);
    }
    __device__ __forceinline__ bool halves_last() const { return true; }
    __device__ __forceinline__ float power_scale() const { return p.power_scale; }

    __device__ __forceinline__ PackedTarget<C> target(const Slot&, const Item& item,
                                                      int warpgroup) const {
        return {p, item.base + warpgroup * kTileRows, item.head};
    }
};

// The same of a batch in which sequences continue others. Keys go by their places (KeyParts).
template <typename C>
struct TreeSource : PackedSource<C> {
    using Base = PackedSource<C>;
    using typename Base::Params, typename Base::T;
    using Parts = KeyParts<C::kBlockN>;
    static constexpr int kOwn = Parts::kOwn;

    struct Item : Base::Item {
        int tile;

        __device__ __forceinline__ Item uniform() const {
            return {Base::Item::uniform(), bytetx::uniform(tile)};
        }
    };
    struct Slot : Base::Slot {
        Item item;  // hides the base's
        Parts parts;
    };
    const Parts* parts = nullptr;  // where the keys lie that are fetched

    __device__ __forceinline__ explicit TreeSource(const Params& params) : Base(params) {}

    __device__ __forceinline__ Item read_item(int index) const {
        const Params& p = this->p;
        const auto own = Base::read_item(index);
        const int tile = index / p.num_heads;
        const int before = Parts::num_places(p.ancestors + tile * kMaxAncestors, p.window);
        return {{own.base, own.rows, 0, before + own.end - own.begin, own.head}, tile};
    }

    __device__ __forceinline__ void fetch_q(T* q, Slot& slot, uint64_t* full, const Item& item) {
        const int4 own = this->p.tiles[item.tile];  // again: registers are scarce
        slot.parts.fill(this->p.ancestors + item.tile * kMaxAncestors, {own.z, own.w},
                        this->p.window);
        parts = &slot.parts;
        Base::fetch_q(q, slot, full, item);
    }

    __device__ __forceinline__ void fetch_kv(T* k, T* v, uint64_t* full, const Item& item,
                                             int place, int thread) const {
        if (thread == 0) Base::fetch_kv(k, v, full, item, parts->row_at(place), thread);
    }

    __device__ __forceinline__ int2 bounds(const Slot& slot, const Item& item, int warpgroup,
                                           int row, int part) const {
        const int in_tile = warpgroup * kTileRows + row;
        return slot.parts.bounds(this->p, part, slot.row_bounds[item.base % 2 + in_tile],
                                 item.base + in_tile);
    }

    __device__ __forceinline__ TreeTarget<C> target(const Slot& slot, const Item& item,
                                                    int warpgroup) const {
        return {Base::target(slot, item, warpgroup), &slot.parts};
    }
};

}  // namespace bytetx::attention
