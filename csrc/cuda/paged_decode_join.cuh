// The join warp of the decode kernel: four warps' sums to one, chunks' sums to a row of the output.
#pragma once

#include "cuda/paged_decode_types.cuh"

namespace bytetx::paged {

// Four neighbouring features of a row, divided by the sum of its weights.
template <typename T>
__device__ __forceinline__ void store_four(T* to, float4 values, float inverse) {
    const uint2 words{pack_pair<T>(values.x * inverse, values.y * inverse),
                      pack_pair<T>(values.z * inverse, values.w * inverse)};
    *reinterpret_cast<uint2*>(to) = words;
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 values, float factor) {
    sum.x += values.x * factor;
    sum.y += values.y * factor;
    sum.z += values.z * factor;
    sum.w += values.w * factor;
}

// The warps' sums of the chunk from key `first` on: to those of the item's chunks before it, and
// behind the item's last one to out or, where other items have other chunks, to memory.
template <typename C>
__device__ __forceinline__ void join_warps(const DecodeParams& p, DecodeSmem<C>& s,
                                           const StagedItem& staged, int first, int chunk,
                                           int first_warp, int lane) {
    using T = typename C::T;
    const PagedItem& item = staged.item;
    constexpr int kFours = C::kDim / 4;
    const int64_t partial = int64_t{item.partial_row} + int64_t{item.chunk} * item.num_rows;
    const bool is_last = first + item.chunk_keys >= item.end_key;
    for (int i = lane; i < item.num_rows * kFours; i += 32) {
        const int row = i / kFours, column = i % kFours * 4;
        SoftmaxState state{kNoMax, 0.0f};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) state.cover(s.states[w][row]);
        float4 sums{};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
            const int warp = (first_warp + w) % kComputeWarps;
            const float factor = state.add(s.states[warp][row]);
            add_scaled(sums, *reinterpret_cast<const float4*>(&s.join[warp][row][column]), factor);
        }
        auto& kept = *reinterpret_cast<float4*>(&s.joined[row][column]);
        if (chunk > 0) {
            SoftmaxState joined = s.joined_states[chunk % 2][row];
            float4 values = kept;
            JoinFactors(joined, state).add(values, sums);
            state = joined;
            sums = values;
        }
        if (!is_last) {
            kept = sums;
            if (column == 0) s.joined_states[(chunk + 1) % 2][row] = state;
        } else if (item.is_split()) {
            const int64_t at = (partial + row) * p.num_kv_heads + staged.kv_head;
            *reinterpret_cast<float4*>(p.partial_out + at * C::kDim + column) = sums;
            if (column == 0) p.partial_states[at] = state;
        } else if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(
                static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) + column,
                sums, 1.0f / state.sum);
        }
    }
    __syncwarp();  // joined_states
}

// Whether this item is the last of its unit's chunks to be in memory: then all of them are visible.
// The counter is left at 0 for the next launch.
__device__ __forceinline__ bool is_last_chunk(const DecodeParams& p, const StagedItem& staged,
                                              int lane) {
    __syncwarp();  // the lanes' sums, before the fence that makes them visible
    unsigned before = 0;
    const auto last = static_cast<unsigned>(staged.item.num_chunks - 1);
    if (lane == 0) {
        __threadfence();  // pairs with the fence below, of the CTA that is last
        before = atomicInc(p.counters + int64_t{staged.item.unit} * p.num_kv_heads + staged.kv_head,
                           last);
        __threadfence();
    }
    return __shfl_sync(kFullMask, before, 0) == last;
}

// Joins the chunks of a unit, which are all in memory: a lane has the state of a chunk, and
// four features of all. Loads go out kBatch at a time, before anything waits for one: under load
// each takes microseconds, and one at a time 16 chunks of 4 rows cost four times the stream of
// keys.
template <typename C>
__device__ __forceinline__ void join_chunks(const DecodeParams& p, const StagedItem& staged,
                                            int lane) {
    using T = typename C::T;
    static_assert(kMaxChunks <= 32);
    constexpr int kBatch = 16;
    constexpr int kColumns = 128;  // columns of all lanes at once
    constexpr int kSweeps = (C::kDim + kColumns - 1) / kColumns;
    const PagedItem& item = staged.item;
    const int64_t chunk_rows = int64_t{item.num_rows} * p.num_kv_heads;
    const int64_t first = int64_t{item.partial_row} * p.num_kv_heads + staged.kv_head;
    const int num_chunks = item.num_chunks;
    for (int i = 0; i < item.num_rows * kSweeps; ++i) {
        const int row = i / kSweeps, column = i % kSweeps * kColumns + lane * 4;
        const int64_t at = first + int64_t{row} * p.num_kv_heads;
        const float* from = p.partial_out + at * C::kDim + column % C::kDim;
        float2 own{kNoMax, 0.0f};
        const auto* states = reinterpret_cast<const float2*>(p.partial_states + at);
        if (lane < num_chunks) own = __ldcg(states + lane * chunk_rows);
        float4 sums{};
        SoftmaxState joined{};
        for (int chunk = 0; chunk < num_chunks; chunk += kBatch) {
            float4 values[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int of = min(chunk + i, num_chunks - 1);
                values[i] =
                    __ldcg(reinterpret_cast<const float4*>(from + of * chunk_rows * C::kDim));
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const SoftmaxState next{__shfl_sync(kFullMask, own.x, chunk + i),
                                        __shfl_sync(kFullMask, own.y, chunk + i)};
                if (chunk + i == 0) {
                    joined = next;
                    sums = values[i];
                } else if (chunk + i < num_chunks) {
                    JoinFactors(joined, next).add(sums, values[i]);
                }
            }
        }
        if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(
                static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) + column,
                sums, 1.0f / joined.sum);
        }
    }
}

template <typename C>
__device__ __forceinline__ void join(const DecodeParams& p, DecodeSmem<C>& s, int total, int lane) {
    RingIndex<kItemsAhead> at;
    RingIndex<1> sums;
    int first_warp = 0;  // that has the chunk's first step
    for (OwnItems items; items.current < total; items.advance(), at.advance()) {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const StagedItem& staged = s.staged[at.index];
        const PagedItem& item = staged.item;
        int chunk = 0;  // index in the item
        for (int first = item.first_key; first < item.end_key; first += item.chunk_keys) {
            Barrier::wait(&s.join_full, sums.phase);
            join_warps(p, s, staged, first, chunk++, first_warp, lane);
            const int num_stages = C::num_stages(item.chunk_end(first) - first);
            first_warp = (first_warp + num_stages) % kComputeWarps;
            Barrier::arrive(&s.join_empty);
            sums.advance();
        }
        if (item.is_split() && is_last_chunk(p, staged, lane)) join_chunks<C>(p, staged, lane);
        Barrier::arrive(&s.item_empty[at.index]);
    }
}

}  // namespace bytetx::paged
