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
                                           const StagedItem& staged, int first_row, int first_warp,
                                           int lane) {
    using T = typename C::T;
    const PagedItem& item = staged.item;
    constexpr int kFours = C::kDim / 4;
    const int num_rows = min(item.num_rows - first_row, C::kJoinRows);
    const int64_t partial = int64_t{item.partial_row} + int64_t{item.chunk} * item.num_rows;
    for (int i = lane; i < num_rows * kFours; i += 32) {
        const int local = i / kFours, column = i % kFours * 4, row = first_row + local;
        float top = kNoMax, weights = 0.0f;
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) top = fmaxf(top, s.stats[w][local].x);
        float4 sums{};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
            const int warp = (first_warp + w) % kComputeWarps;
            const float2 stat = s.stats[warp][local];
            const float factor = exp2_approx(stat.x - top);
            weights += stat.y * factor;
            add_scaled(sums, *reinterpret_cast<const float4*>(&s.join[warp][local][column]),
                       factor);
        }
        if (item.num_chunks > 1) {
            const int64_t at = (partial + row) * p.num_kv_heads + staged.kv_head;
            *reinterpret_cast<float4*>(p.partial_out + at * C::kDim + column) = sums;
            if (column == 0) p.partial_stats[at] = {top, weights};
        } else if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(
                static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) + column,
                sums, 1.0f / weights);
        }
    }
}

// Whether this item is the last of its unit's chunks to be in memory: then all of them are visible.
// The counter is left at 0 for the next launch. A fence that acquires empties the SM's L1, so that
// only who joins has one.
template <typename C>
__device__ __forceinline__ bool is_last_chunk(const DecodeParams& p, const StagedItem& staged,
                                              int lane) {
    __syncwarp();  // the lanes' sums, before the release that makes them visible
    unsigned before = 0;
    const auto last = static_cast<unsigned>(staged.item.num_chunks - 1);
    if (lane == 0) {
        unsigned* counter =
            p.counters + int64_t{staged.item.unit} * p.num_kv_heads + staged.kv_head;
        asm volatile("atom.release.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(counter), "r"(last)
                     : "memory");  // pairs with the fence below, of the CTA that is last
        if (before == last) __threadfence();
    }
    return __shfl_sync(kFullMask, before, 0) == last;
}

// Over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
    for (int by = kLanes / 2; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, by));
    return x;
}

template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int by = kLanes / 2; by > 0; by /= 2) x += __shfl_xor_sync(kFullMask, x, by);
    return x;
}

// Joins the chunks of a unit, which are all in memory, kRows rows at a time: a lane a chunk of a
// row for the factors, then a lane four features. Loads go out kBatch at a time, before anything
// waits for one: under load each takes microseconds, and one at a time 16 chunks of 4 rows cost
// four times the stream of keys.
template <typename C, int kRows>
__device__ __forceinline__ void join_rows(const DecodeParams& p, const StagedItem& staged,
                                          int lane) {
    using T = typename C::T;
    static_assert(kMaxChunks <= 32 && C::kDim <= 128);
    constexpr int kBatch = 16, kLanes = 32 / kRows, kChunks = kBatch / kRows;
    const PagedItem& item = staged.item;
    const int64_t chunk_rows = int64_t{item.num_rows} * p.num_kv_heads;
    const int64_t first = int64_t{item.partial_row} * p.num_kv_heads + staged.kv_head;
    const int64_t chunk_fours = chunk_rows * (C::kDim / 4);
    const int column = lane * 4, num_chunks = item.num_chunks;
    for (int row = 0; row < item.num_rows; row += kRows) {
        const auto place = [&](int local, int chunk) {  // a row past the last one: the last one
            const int64_t of_row = min(row + local, item.num_rows - 1);
            return first + of_row * p.num_kv_heads + chunk * chunk_rows;
        };
        float2 stat{kNoMax, 0.0f};
        if (lane % kLanes < num_chunks) {
            stat = __ldcg(p.partial_stats + place(lane / kLanes, lane % kLanes));
        }
        const float4* from[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            from[i] = reinterpret_cast<const float4*>(p.partial_out + place(i, 0) * C::kDim) +
                      lane % (C::kDim / 4);
        }
        float4 sums[kRows]{};
        float own_factor = 0.0f, weights = 0.0f;
        for (int chunk = 0; chunk < num_chunks; chunk += kChunks) {
            float4 values[kRows][kChunks];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int of = min(chunk + i % kChunks, num_chunks - 1);
                values[i / kChunks][i % kChunks] = __ldcg(from[i / kChunks] + of * chunk_fours);
            }
            if (chunk == 0) {
                own_factor = exp2_approx(stat.x - lanes_max<kLanes>(stat.x));
                weights = lanes_sum<kLanes>(stat.y * own_factor);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int of = chunk + i % kChunks;
                const float factor =
                    __shfl_sync(kFullMask, own_factor, i / kChunks * kLanes + of % kLanes);
                if (of < num_chunks) {
                    add_scaled(sums[i / kChunks], values[i / kChunks][i % kChunks], factor);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float inverse = 1.0f / __shfl_sync(kFullMask, weights, i * kLanes);
            if (column >= p.head_dim || row + i >= item.num_rows) continue;
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            const int64_t at = row_address(p, item, staged.kv_head, row + i, stride) + column;
            store_four(static_cast<T*>(p.out) + at, sums[i], inverse);
        }
    }
}

template <typename C>
__device__ __forceinline__ void join_chunks(const DecodeParams& p, const StagedItem& staged,
                                            int lane) {
    if (staged.item.num_chunks <= 8) return join_rows<C, 2>(p, staged, lane);
    join_rows<C, 1>(p, staged, lane);
}

template <typename C>
__device__ __forceinline__ void join(const DecodeParams& p, DecodeSmem<C>& s, int total, int lane) {
    RingIndex<kItemsAhead> at;
    RingIndex<1> sums;
    int first_warp = 0;  // that has the item's first step
    for (int index = blockIdx.x; index < total; index += gridDim.x, at.advance()) {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const StagedItem& staged = s.staged[at.index];
        for (int row = 0; row < staged.item.num_rows; row += C::kJoinRows, sums.advance()) {
            Barrier::wait(&s.join_full, sums.phase);
            join_warps(p, s, staged, row, first_warp, lane);
            Barrier::arrive(&s.join_empty);
        }
        first_warp = (first_warp + staged.item.num_steps()) % kComputeWarps;
        if (staged.item.num_chunks > 1 && is_last_chunk<C>(p, staged, lane)) {
            join_chunks<C>(p, staged, lane);
        }
        Barrier::arrive(&s.item_empty[at.index]);
    }
}

}  // namespace bytetx::paged
