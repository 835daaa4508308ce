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

// Joins the sums of a row's next chunk to those of the chunks before it. It has the same bits
// wherever it is done, in a CTA that has both chunks or in one that reads them from memory: hence
// every rounding is named.
struct JoinFactors {
    float kept, added;

    // Both {row_max, sum of weights}.
    __device__ __forceinline__ JoinFactors(float2& joined, float2 next) {
        const float most = fmaxf(joined.x, next.x);
        kept = exp2_approx(__fsub_rn(joined.x, most));
        added = exp2_approx(__fsub_rn(next.x, most));
        joined = {most, one(joined.y, next.y)};
    }

    __device__ __forceinline__ float one(float joined, float next) const {
        return __fmaf_rn(next, added, __fmul_rn(joined, kept));
    }

    __device__ __forceinline__ void add(float4& joined, float4 next) const {
        joined = {one(joined.x, next.x), one(joined.y, next.y), one(joined.z, next.z),
                  one(joined.w, next.w)};
    }
};

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
        float2 stats{kNoMax, 0.0f};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) stats.x = fmaxf(stats.x, s.stats[w][row].x);
        float4 sums{};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
            const int warp = (first_warp + w) % kComputeWarps;
            const float2 stat = s.stats[warp][row];
            const float factor = exp2_approx(stat.x - stats.x);
            stats.y += stat.y * factor;
            add_scaled(sums, *reinterpret_cast<const float4*>(&s.join[warp][row][column]), factor);
        }
        auto& kept = *reinterpret_cast<float4*>(&s.joined[row][column]);
        if (chunk > 0) {
            float2 joined = s.joined_stats[chunk % 2][row];
            float4 values = kept;
            JoinFactors(joined, stats).add(values, sums);
            stats = joined;
            sums = values;
        }
        if (!is_last) {
            kept = sums;
            if (column == 0) s.joined_stats[(chunk + 1) % 2][row] = stats;
        } else if (item.is_split()) {
            const int64_t at = (partial + row) * p.num_kv_heads + staged.kv_head;
            *reinterpret_cast<float4*>(p.partial_out + at * C::kDim + column) = sums;
            if (column == 0) p.partial_stats[at] = stats;
        } else if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(
                static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) + column,
                sums, 1.0f / stats.y);
        }
    }
    __syncwarp();  // joined_stats
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

// Joins the chunks of a unit, which are all in memory: a lane has the statistics of a chunk, and
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
        float2 stat{kNoMax, 0.0f};
        if (lane < num_chunks) stat = __ldcg(p.partial_stats + at + lane * chunk_rows);
        float4 sums{};
        float2 joined{};
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
                const float2 next{__shfl_sync(kFullMask, stat.x, chunk + i),
                                  __shfl_sync(kFullMask, stat.y, chunk + i)};
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
                sums, 1.0f / joined.y);
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
            const int num_steps = num_steps_of(item.chunk_end(first) - first);
            first_warp = (first_warp + num_steps) % kComputeWarps;
            Barrier::arrive(&s.join_empty);
            sums.advance();
        }
        if (item.is_split() && is_last_chunk(p, staged, lane)) join_chunks<C>(p, staged, lane);
        Barrier::arrive(&s.item_empty[at.index]);
    }
}

}  // namespace bytetx::paged
