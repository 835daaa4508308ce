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

// The sums of the warps, to out or, where there are more chunks, to memory.
template <typename C>
__device__ __forceinline__ void join_warps(const DecodeParams& p, const DecodeSmem<C>& s,
                                           const StagedItem& staged, int first_warp, int lane) {
    using T = typename C::T;
    const PagedItem& item = staged.item;
    constexpr int kFours = C::kDim / 4;
    const int64_t partial = int64_t{item.partial_row} + int64_t{item.chunk} * item.num_rows;
    for (int i = lane; i < item.num_rows * kFours; i += 32) {
        const int row = i / kFours, column = i % kFours * 4;
        float row_max = kNoMax, weights = 0.0f;
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) row_max = fmaxf(row_max, s.stats[w][row].x);
        float4 sums{};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
            const int warp = (first_warp + w) % kComputeWarps;
            const float2 stat = s.stats[warp][row];
            const float factor = exp2_approx(stat.x - row_max);
            weights += stat.y * factor;
            add_scaled(sums, *reinterpret_cast<const float4*>(&s.join[warp][row][column]), factor);
        }
        if (item.num_chunks > 1) {
            const int64_t at = (partial + row) * p.num_kv_heads + staged.kv_head;
            *reinterpret_cast<float4*>(p.partial_out + at * C::kDim + column) = sums;
            if (column == 0) p.partial_stats[at] = {row_max, weights};
        } else if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(
                static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) + column,
                sums, 1.0f / weights);
        }
    }
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

__device__ __forceinline__ float warp_max(float x) {
    for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, by));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(kFullMask, x, by);
    return x;
}

// Joins the chunks of a unit, which are all in memory: a lane a chunk for the factors, then a lane
// four features. Loads go out kBatch at a time, before anything waits for one: under load each
// takes microseconds, and one at a time 16 chunks of 4 rows cost four times the stream of keys.
template <typename C>
__device__ __forceinline__ void join_chunks(const DecodeParams& p, const StagedItem& staged,
                                            int lane) {
    using T = typename C::T;
    static_assert(kMaxChunks <= 32);
    constexpr int kBatch = 16;
    constexpr int kColumns = 128;  // of all lanes at once
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
        float own_factor = 0.0f, weights = 0.0f;
        for (int chunk = 0; chunk < num_chunks; chunk += kBatch) {
            float4 values[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int of = min(chunk + i, num_chunks - 1);
                values[i] =
                    __ldcg(reinterpret_cast<const float4*>(from + of * chunk_rows * C::kDim));
            }
            if (chunk == 0) {
                own_factor = exp2_approx(stat.x - warp_max(stat.x));
                weights = warp_sum(stat.y * own_factor);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const float factor = __shfl_sync(kFullMask, own_factor, chunk + i);
                if (chunk + i < num_chunks) add_scaled(sums, values[i], factor);
            }
        }
        if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(
                static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) + column,
                sums, 1.0f / weights);
        }
    }
}

template <typename C>
__device__ __forceinline__ void join(const DecodeParams& p, DecodeSmem<C>& s, int total, int lane) {
    RingIndex<kItemsAhead> at;
    RingIndex<1> sums;
    int first_warp = 0;  // that has the item's first step
    for (OwnItems items; items.current < total; items.advance(), at.advance()) {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const StagedItem& staged = s.staged[at.index];
        Barrier::wait(&s.join_full, sums.phase);
        join_warps(p, s, staged, first_warp, lane);
        first_warp = (first_warp + staged.item.num_steps()) % kComputeWarps;
        Barrier::arrive(&s.join_empty);
        sums.advance();
        if (staged.item.num_chunks > 1 && is_last_chunk(p, staged, lane)) {
            join_chunks<C>(p, staged, lane);
        }
        Barrier::arrive(&s.item_empty[at.index]);
    }
}

}  // namespace bytetx::paged
