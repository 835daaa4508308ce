// Attention of few rows over many paged keys: the kernel of decode rows.
//
// An item of the plan is a chunk of one sequence's keys, read for one key head by one CTA, for up to
// 16 rows: the query heads that share the key head. Six warps, each with one duty, so that no wait
// for memory stands in the way of the stream of keys. Under a saturated memory every dependent load
// costs microseconds: with all duties in the four compute warps, items of 256 keys ran at 0.41 of the
// copy rate, most of it waits at their ends (H200, 2026-11-21).
//
//   scout      an item or two ahead: the item's record, its queries and pages, to shared memory
//   compute    four warps take 16 keys in turn, | w0 | w1 | w2 | w3 | w0 | w1 | ..., each through a
//              ring of its own (cp.async, no barrier but the warp's) and with a softmax of its own;
//              rings run on into the next item
//   join       adds the four warps' sums, writes them, and where it finishes a sequence's last
//              chunk, joins all chunks in the order of the keys: who is last changes no bit
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/row.cuh"
#include "cuda/paged_mma.cuh"
#include "cuda/paged_plan.cuh"

namespace bytetx::paged {

using Barrier = cutlass::arch::ClusterBarrier;

struct DecodeParams {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    void* out;
    const int* page_table;
    const PagedHeader* header;
    const PagedItem* items;
    unsigned* counters;     // [units, num_kv_heads]
    float* partial_out;     // [partial_rows, num_kv_heads, kDim], sums that are not yet divided
    float2* partial_stats;  // [partial_rows, num_kv_heads] {top, sum}
    int64_t max_pages;
    int64_t q_stride;
    int page_shift;
    int num_heads;
    int num_kv_heads;
    int group;
    int head_dim;
    int window;
    float scale;  // of scores, to powers of two
};

constexpr int kComputeWarps = kRoundKeys / kStepKeys;
constexpr int kScoutWarp = kComputeWarps;
constexpr int kJoinWarp = kComputeWarps + 1;
constexpr int kDecodeThreads = 32 * (kComputeWarps + 2);
constexpr int kItemsAhead = 3;     // in shared memory
constexpr int kStagedSteps = 128;  // of an item whose pages are staged: 2048 keys
constexpr int kJoinRows = 8;       // of a join buffer: half of mma's rows
constexpr int kJoinBuffers = 2;

template <typename T_, int kHeadDim>
struct DecodeTypes {
    using T = T_;
    static constexpr int kDim = kHeadDim;
    // A ring of two is enough: 64 KB of an SM are on their way, twice what the latency of an idle
    // memory needs; more only makes every load wait longer. Warps with rings of kItemsAhead + 1
    // stages would wait for items that wait for them.
    static constexpr int kStages = kHeadDim <= 64 ? 3 : 2;
    static constexpr int kMinCtas = kHeadDim <= 64 ? 3 : 2;
    static constexpr int kPieces = kDim / 8;  // of 16 bytes, a row
    static constexpr int kCopies = kStepKeys * kPieces / 32;
    static constexpr int kTileBytes = kStepKeys * kDim * 2;
    static constexpr int kJoinStride = kDim + 8;  // floats: rows in different banks
    static_assert(kStages <= kItemsAhead);
};

struct StagedItem {
    PagedItem item;
    int kv_head;
    int pages[kStagedSteps];  // of each step, where pages hold a step or more
};

template <typename C>
struct DecodeSmem {
    alignas(128) uint8_t ring[kComputeWarps][C::kStages][2][C::kTileBytes];  // keys, values
    alignas(128) uint8_t q[kItemsAhead][C::kTileBytes];
    alignas(16) float join[kJoinBuffers][kComputeWarps][kJoinRows][C::kJoinStride];
    float2 stats[kJoinBuffers][kComputeWarps][kJoinRows];
    StagedItem staged[kItemsAhead];
    uint64_t item_full[kItemsAhead], item_empty[kItemsAhead];
    uint64_t join_full[kJoinBuffers], join_empty[kJoinBuffers];
};

// Of a row's first element in q or out.
__device__ __forceinline__ int64_t row_address(const DecodeParams& p, const PagedItem& item,
                                               int kv_head, int local, int64_t stride) {
    const int row = item.row + local;
    return (item.first_token + row / p.group) * stride +
           int64_t{kv_head * p.group + row % p.group} * p.head_dim;
}

__device__ __forceinline__ int num_items(const DecodeParams& p) {
    return p.header->num_items * p.num_kv_heads;
}

// ---- scout

template <typename C>
__device__ __forceinline__ void stage_queries(const DecodeParams& p, const PagedItem& item,
                                              int kv_head, uint8_t* to, int lane) {
    using T = typename C::T;
#pragma unroll
    for (int i = 0; i < C::kCopies; ++i) {
        const int row = (i * 32 + lane) / C::kPieces, piece = (i * 32 + lane) % C::kPieces;
        uint4 words{};
        if (row < item.num_rows && piece * 8 < p.head_dim) {
            words = *reinterpret_cast<const uint4*>(
                static_cast<const T*>(p.q) + row_address(p, item, kv_head, row, p.q_stride) +
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

// ---- compute

// The warp's place in the stream of keys of all its items, ahead of where it computes.
template <typename C>
struct Fetcher {
    using T = typename C::T;
    const DecodeParams& p;
    DecodeSmem<C>& s;
    int warp, lane, total;
    int index;                   // of the item
    RingIndex<kItemsAhead> at;  // where it is staged
    int round = -1;  // first key of the warps' next step; -1: before an item
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
        const int page = is_staged ? staged.pages[step]
                                   : p.page_table[staged.item.sequence * p.max_pages +
                                                  (own >> p.page_shift)];
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

// A warp's 16 rows, in the layout of mma's sums: a thread has rows lane / 4 and lane / 4 + 8.
template <typename C>
struct RowUnit {
    using T = typename C::T;
    static constexpr int kSteps = C::kDim / 16;
    uint32_t q[kSteps][4];
    float out[2 * kSteps][4];
    float top[2], sum[2];
    int begin[2], end[2];      // keys of the thread's rows
    int full_begin, full_end;  // keys that all rows of the unit see

    __device__ void start(const DecodeParams& p, const PagedItem& item, uint32_t q_tile, int lane) {
        const auto bounds = [&](int local) {
            const int position = item.position + (item.row + min(local, item.num_rows - 1)) / p.group;
            const int low = p.window > 0 ? max(0, position + 1 - p.window) : 0;
            return make_int2(low, min(position + 1, item.end_key));
        };
        full_begin = bounds(item.num_rows - 1).x;
        full_end = bounds(0).y;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int2 own = bounds(lane / 4 + 8 * half);
            begin[half] = own.x;
            end[half] = own.y;
            top[half] = kNoMax;
            sum[half] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            load_matrices<false>(q[step],
                                 q_tile + piece_offset<C::kDim>(lane % 16, 2 * step + lane / 16));
        }
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
        }
    }

    __device__ void attend(uint32_t stage, int key, float scale, int lane) {
        float scores[2][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t k[4];
            const int of_row = lane % 8 + lane / 16 * 8, piece = 2 * step + lane / 8 % 2;
            load_matrices<false>(k, stage + piece_offset<C::kDim>(of_row, piece));
            mma<T>(scores[0], q[step], k[0], k[1]);
            mma<T>(scores[1], q[step], k[2], k[3]);
        }
        uint32_t weights[4];
        soften(scores, weights, key, scale, lane);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t v[4];
            const int of_row = lane % 16, piece = 2 * step + lane / 16;
            load_matrices<true>(v, stage + C::kTileBytes + piece_offset<C::kDim>(of_row, piece));
            mma<T>(out[2 * step], weights, v[0], v[1]);
            mma<T>(out[2 * step + 1], weights, v[2], v[3]);
        }
    }

    // Scores to weights, packed as the next product wants them; top, sum and out follow.
    __device__ void soften(float (&scores)[2][4], uint32_t (&weights)[4], int key, float scale,
                           int lane) {
        const bool is_full = key >= full_begin && key + kStepKeys <= full_end;
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, at = key + tile * 8 + lane % 4 * 2 + i % 2;
                scores[tile][i] *= scale;
                if (!is_full && (at < begin[half] || at >= end[half])) scores[tile][i] = -INFINITY;
                largest[half] = fmaxf(largest[half], scores[tile][i]);
            }
        }
        raise_top(quad_max(largest[0]), quad_max(largest[1]));
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[tile][i] = exp2_approx(scores[tile][i] - top[i / 2]);
                sum[i / 2] += scores[tile][i];
            }
            weights[2 * tile] = pack_pair<T>(scores[tile][0], scores[tile][1]);
            weights[2 * tile + 1] = pack_pair<T>(scores[tile][2], scores[tile][3]);
        }
    }

    // A row's own scores decide, never its neighbours': the vote only skips work that changes
    // nothing.
    __device__ void raise_top(float largest0, float largest1) {
        const float largest[2] = {largest0, largest1};
        const bool raise[2] = {largest0 > top[0] + kMaxSlack, largest1 > top[1] + kMaxSlack};
        if (!__any_sync(kFullMask, raise[0] || raise[1])) return;
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float next = raise[half] ? largest[half] : top[half];
            factor[half] = exp2_approx(top[half] - next);
            sum[half] *= factor[half];
            top[half] = next;
        }
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] *= factor[j / 2];
        }
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
                *reinterpret_cast<float2*>(row + 8 * i + lane % 4 * 2) = {unit.out[i][2 * half],
                                                                          unit.out[i][2 * half + 1]};
            }
            if (lane % 4 == 0) s.stats[at.index][warp][lane / 4] = {unit.top[half], sum};
        }
        __syncwarp();
        if (lane == 0) Barrier::arrive(&s.join_full[at.index]);
        at.advance();
    }
}

template <typename C>
__device__ __forceinline__ void compute(const DecodeParams& p, DecodeSmem<C>& s, int total, int warp,
                                        int lane) {
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

// ---- join

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

// Eight rows' sums of the four warps, to out or, where there are more chunks, to memory.
template <typename C>
__device__ __forceinline__ void join_warps(const DecodeParams& p, const DecodeSmem<C>& s,
                                           const StagedItem& staged, int buffer, int first_row,
                                           int lane) {
    using T = typename C::T;
    const PagedItem& item = staged.item;
    constexpr int kFours = C::kDim / 4;
    const int num_rows = min(kJoinRows, item.num_rows - first_row);
    const int64_t partial = int64_t{item.partial_row} + int64_t{item.chunk} * item.num_rows;
    for (int i = lane; i < num_rows * kFours; i += 32) {
        const int local = i / kFours, column = i % kFours * 4, row = first_row + local;
        float top = kNoMax, weights = 0.0f;
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) top = fmaxf(top, s.stats[buffer][w][local].x);
        float4 sums{};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
            const float2 stat = s.stats[buffer][w][local];
            const float factor = exp2_approx(stat.x - top);
            weights += stat.y * factor;
            add_scaled(sums, *reinterpret_cast<const float4*>(&s.join[buffer][w][local][column]),
                       factor);
        }
        if (item.num_chunks > 1) {
            const int64_t at = (partial + row) * p.num_kv_heads + staged.kv_head;
            *reinterpret_cast<float4*>(p.partial_out + at * C::kDim + column) = sums;
            if (column == 0) p.partial_stats[at] = {top, weights};
        } else if (column < p.head_dim) {
            const int64_t stride = int64_t{p.num_heads} * p.head_dim;
            store_four(static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) +
                           column,
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
        before = atomicInc(
            p.counters + int64_t{staged.item.unit} * p.num_kv_heads + staged.kv_head, last);
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
// four features. Loads go out kBatch at a time, before anything waits for one: under load each takes
// microseconds, and one at a time 16 chunks of 4 rows cost four times the stream of keys.
template <typename C>
__device__ __forceinline__ void join_chunks(const DecodeParams& p, const StagedItem& staged,
                                            int lane) {
    using T = typename C::T;
    static_assert(kChunking.max_chunks <= 32 && C::kDim <= 128);
    constexpr int kBatch = 16;
    const PagedItem& item = staged.item;
    const int64_t chunk_rows = int64_t{item.num_rows} * p.num_kv_heads;
    const int64_t first = int64_t{item.partial_row} * p.num_kv_heads + staged.kv_head;
    const int column = lane * 4, num_chunks = item.num_chunks;
    for (int row = 0; row < item.num_rows; ++row) {
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
                values[i] = __ldcg(reinterpret_cast<const float4*>(from + of * chunk_rows * C::kDim));
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
            store_four(static_cast<T*>(p.out) + row_address(p, item, staged.kv_head, row, stride) +
                           column,
                       sums, 1.0f / weights);
        }
    }
}

template <typename C>
__device__ __forceinline__ void join(const DecodeParams& p, DecodeSmem<C>& s, int total, int lane) {
    RingIndex<kItemsAhead> at;
    RingIndex<kJoinBuffers> buffer;
    for (int index = blockIdx.x; index < total; index += gridDim.x, at.advance()) {
        Barrier::wait(&s.item_full[at.index], at.phase);
        const StagedItem& staged = s.staged[at.index];
        for (int row = 0; row < staged.item.num_rows; row += kJoinRows, buffer.advance()) {
            Barrier::wait(&s.join_full[buffer.index], buffer.phase);
            join_warps(p, s, staged, buffer.index, row, lane);
            __syncwarp();
            if (lane == 0) Barrier::arrive(&s.join_empty[buffer.index]);
        }
        if (staged.item.num_chunks > 1 && is_last_chunk(p, staged, lane)) {
            join_chunks<C>(p, staged, lane);
        }
        __syncwarp();
        if (lane == 0) Barrier::arrive(&s.item_empty[at.index]);
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
