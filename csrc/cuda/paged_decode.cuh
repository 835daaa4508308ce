// Attention of few rows over many paged keys: the kernel of decode rows.
//
// An item of the plan is a chunk of one sequence's keys, read for one key head by one CTA, for up to
// 16 rows: the query heads that share the key head. The CTA's four warps take 16 keys in turn, each
// through a ring of its own in shared memory (no barrier but the warp's), and each with a softmax of
// its own; the CTA joins the four at the end of the item. Rings run on into the next item.
//
//   keys of a chunk   | w0 | w1 | w2 | w3 | w0 | w1 | ...      16 keys each
//
// Where a sequence has several chunks, sums go to memory, and the CTA that finishes last joins them
// in the order of the keys: the result does not depend on who is last.
#pragma once

#include "common/launch.cuh"
#include "common/row.cuh"
#include "cuda/paged_mma.cuh"
#include "cuda/paged_plan.cuh"

namespace bytetx::paged {

struct DecodeParams {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    void* out;
    const int* cu_seqlens;
    const int* kv_seqlens;
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

template <typename T_, int kHeadDim>
struct DecodeTypes {
    using T = T_;
    static constexpr int kDim = kHeadDim;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kStages = kHeadDim <= 64 ? 4 : 3;
    static constexpr int kMinCtas = kHeadDim <= 32 ? 4 : kHeadDim <= 64 ? 3 : 2;
    static constexpr int kPieces = kDim / 8;  // of 16 bytes, a row
    static constexpr int kCopies = kStepKeys * kPieces / 32;
    static constexpr int kTileBytes = kStepKeys * kDim * 2;
    static constexpr int kJoinStride = kDim + 8;  // floats: rows in different banks
};

template <typename C>
struct DecodeSmem {
    alignas(128) uint8_t ring[C::kWarps][C::kStages][2][C::kTileBytes];  // keys, values
    alignas(16) float join[C::kWarps][8][C::kJoinStride];
    float2 stats[C::kWarps][kUnitRows];
    int is_last;
};

// What a CTA's items are: every gridDim.x-th, so that neighbouring heads of the same pages are read
// at the same time.
struct ItemList {
    const DecodeParams& p;
    int total;

    __device__ explicit ItemList(const DecodeParams& params)
        : p(params), total(params.header->num_items * params.num_kv_heads) {}
    __device__ PagedItem item(int index) const { return p.items[index / p.num_kv_heads]; }
    __device__ int kv_head(int index) const { return index % p.num_kv_heads; }
};

// The warp's place in the stream of keys of all its items, ahead of where it computes.
template <typename C>
struct Fetcher {
    using T = typename C::T;
    const DecodeParams& p;
    const ItemList& list;
    int warp, lane;
    int index;  // of the item
    int key, end_key;
    int first_visible;
    int64_t table;  // of the sequence, in page_table
    int kv_head;
    int page;  // of key + lane % 16

    __device__ Fetcher(const DecodeParams& params, const ItemList& items, int of_warp, int of_lane)
        : p(params), list(items), warp(of_warp), lane(of_lane), index(blockIdx.x) {
        enter();
    }

    // The first item from `index` on that has keys for this warp.
    __device__ void enter() {
        for (; index < list.total; index += gridDim.x) {
            const PagedItem item = list.item(index);
            key = item.first_key + warp * kStepKeys;
            end_key = item.end_key;
            if (key >= end_key) continue;
            kv_head = list.kv_head(index);
            table = item.sequence * p.max_pages;
            first_visible = item.first_key;
            if (p.window > 0) {
                const int tokens = p.cu_seqlens[item.sequence + 1] - p.cu_seqlens[item.sequence];
                first_visible = max(first_visible, p.kv_seqlens[item.sequence] - tokens + 1 - p.window);
            }
            load_page();
            return;
        }
    }

    __device__ bool is_read(int of_key) const { return of_key >= first_visible && of_key < end_key; }

    __device__ void load_page() {
        const int own = key + lane % kStepKeys;
        page = is_read(own) ? p.page_table[table + (own >> p.page_shift)] : 0;
    }

    // Starts the copies of 16 keys and values into `stage`, a shared address; zeros for those that no
    // row sees, whose memory may hold anything.
    __device__ void fetch(uint32_t stage) {
        if (index < list.total) {
            const int own = key + lane % kStepKeys;
            const int slot = (page << p.page_shift) | (own & ((1 << p.page_shift) - 1));
#pragma unroll
            for (int i = 0; i < C::kCopies; ++i) {
                const int row = (i * 32 + lane) / C::kPieces, piece = (i * 32 + lane) % C::kPieces;
                const int64_t row_slot = __shfl_sync(kFullMask, slot, row);
                const bool is_there = is_read(key + row) && piece * 8 < p.head_dim;
                const int64_t at =
                    is_there ? (row_slot * p.num_kv_heads + kv_head) * p.head_dim + piece * 8 : 0;
                const uint32_t to = stage + piece_offset<C::kDim>(row, piece);
                copy_or_zero(to, static_cast<const T*>(p.k_cache) + at, is_there ? 16 : 0);
                copy_or_zero(to + C::kTileBytes, static_cast<const T*>(p.v_cache) + at,
                             is_there ? 16 : 0);
            }
            key += C::kWarps * kStepKeys;
            if (key < end_key) {
                load_page();
            } else {
                index += gridDim.x;
                enter();
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
    int begin[2], end[2];       // keys of the thread's rows
    int full_begin, full_end;  // keys that all rows of the unit see
    int64_t first_token;        // of the piece
    int kv_head, row, num_rows;

    __device__ void start(const DecodeParams& p, const PagedItem& item, int of_kv_head, int lane) {
        const int first = p.cu_seqlens[item.sequence];
        const int tokens = p.cu_seqlens[item.sequence + 1] - first;
        const int past = p.kv_seqlens[item.sequence] - tokens;
        first_token = first;
        kv_head = of_kv_head;
        row = item.row;
        num_rows = min(kUnitRows, tokens * p.group - row);
        const auto bounds = [&](int local) {
            const int position = past + (row + min(local, num_rows - 1)) / p.group;
            const int low = p.window > 0 ? max(0, position + 1 - p.window) : 0;
            return make_int2(low, min(position + 1, item.end_key));
        };
        full_begin = bounds(num_rows - 1).x;
        full_end = bounds(0).y;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = lane / 4 + 8 * half;
            const int2 own = bounds(local);
            begin[half] = own.x;
            end[half] = own.y;
            top[half] = kNoMax;
            sum[half] = 0.0f;
            const T* from = static_cast<const T*>(p.q) + address(p, local, p.q_stride);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int right = 0; right < 2; ++right) {
                    const int column = step * 16 + right * 8 + lane % 4 * 2;
                    const bool is_there = local < num_rows && column < p.head_dim;
                    q[step][half + 2 * right] =
                        is_there ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
        }
    }

    // Of a row's first element in q or out; a row that the unit does not have gets that of its last.
    __device__ int64_t address(const DecodeParams& p, int local, int64_t stride) const {
        const int in_piece = row + min(local, num_rows - 1);
        const int head = kv_head * p.group + in_piece % p.group;
        return (first_token + in_piece / p.group) * stride + int64_t{head} * p.head_dim;
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
        const uint32_t (&weights)[4] = soften(scores, key, scale, lane);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t v[4];
            const int of_row = lane % 16, piece = 2 * step + lane / 16;
            load_matrices<true>(v, stage + C::kTileBytes + piece_offset<C::kDim>(of_row, piece));
            mma<T>(out[2 * step], weights, v[0], v[1]);
            mma<T>(out[2 * step + 1], weights, v[2], v[3]);
        }
    }

    uint32_t packed[4];

    // Scores to weights, packed as the next product wants them; top, sum and out follow.
    __device__ const uint32_t (&soften(float (&scores)[2][4], int key, float scale, int lane))[4] {
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
            packed[2 * tile] = pack_pair<T>(scores[tile][0], scores[tile][1]);
            packed[2 * tile + 1] = pack_pair<T>(scores[tile][2], scores[tile][3]);
        }
        return packed;
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

// The four warps' rows as one, to `out` or, where the item is one chunk of several, to memory.
template <typename C>
__device__ __forceinline__ void join_warps(const DecodeParams& p, DecodeSmem<C>& s,
                                           RowUnit<C>& unit, const PagedItem& item, int warp,
                                           int lane) {
    using T = typename C::T;
    const int64_t partial = int64_t{item.partial_row} + int64_t{item.chunk} * unit.num_rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(unit.sum[half]);
        if (lane % 4 == 0) s.stats[warp][lane / 4 + 8 * half] = {unit.top[half], sum};
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int num_rows = min(8, unit.num_rows - 8 * half);
        if (num_rows <= 0) break;
#pragma unroll
        for (int i = 0; i < C::kDim / 8; ++i) {
            *reinterpret_cast<float2*>(&s.join[warp][lane / 4][8 * i + lane % 4 * 2]) = {
                unit.out[i][2 * half], unit.out[i][2 * half + 1]};
        }
        __syncthreads();
        for (int i = threadIdx.x; i < num_rows * (C::kDim / 4); i += C::kThreads) {
            const int local = i / (C::kDim / 4), column = i % (C::kDim / 4) * 4;
            const int row = local + 8 * half;
            float top = s.stats[0][row].x;
            for (int w = 1; w < C::kWarps; ++w) top = fmaxf(top, s.stats[w][row].x);
            float4 sums{};
            float weights = 0.0f;
            for (int w = 0; w < C::kWarps; ++w) {
                const float factor = exp2_approx(s.stats[w][row].x - top);
                weights += s.stats[w][row].y * factor;
                add_scaled(sums, *reinterpret_cast<const float4*>(&s.join[w][local][column]), factor);
            }
            if (item.num_chunks > 1) {
                const int64_t at = (partial + row) * p.num_kv_heads + unit.kv_head;
                *reinterpret_cast<float4*>(p.partial_out + at * C::kDim + column) = sums;
                if (column == 0) p.partial_stats[at] = {top, weights};
            } else if (column < p.head_dim) {
                const int64_t stride = int64_t{p.num_heads} * p.head_dim;
                store_four(static_cast<T*>(p.out) + unit.address(p, row, stride) + column, sums,
                           1.0f / weights);
            }
        }
        __syncthreads();  // before the next half or item writes join and stats
    }
}

// Joins the chunks of a unit, which are all in memory.
template <typename C>
__device__ __forceinline__ void join_chunks(const DecodeParams& p, DecodeSmem<C>& s,
                                            const RowUnit<C>& unit, const PagedItem& item) {
    using T = typename C::T;
    auto* stats = reinterpret_cast<float2*>(&s.join[0][0][0]);  // [chunk][row]
    static_assert(sizeof(s.join) >= kChunking.max_chunks * kUnitRows * sizeof(float2));
    const int64_t first = int64_t{item.partial_row} * p.num_kv_heads + unit.kv_head;
    const int num_rows = unit.num_rows;
    for (int i = threadIdx.x; i < num_rows * item.num_chunks; i += C::kThreads) {
        stats[i] = __ldcg(p.partial_stats + first + int64_t{i} * p.num_kv_heads);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows * (C::kDim / 4); i += C::kThreads) {
        const int row = i / (C::kDim / 4), column = i % (C::kDim / 4) * 4;
        float top = kNoMax;
        for (int c = 0; c < item.num_chunks; ++c) top = fmaxf(top, stats[c * num_rows + row].x);
        const float* from = p.partial_out + (first + int64_t{row} * p.num_kv_heads) * C::kDim + column;
        const int64_t stride = int64_t{num_rows} * p.num_kv_heads * C::kDim;
        float4 sums{};
        float weights = 0.0f;
#pragma unroll 8
        for (int c = 0; c < item.num_chunks; ++c) {
            const float4 values = __ldcg(reinterpret_cast<const float4*>(from + c * stride));
            const float2 stat = stats[c * num_rows + row];
            const float factor = exp2_approx(stat.x - top);
            weights += stat.y * factor;
            add_scaled(sums, values, factor);
        }
        if (column < p.head_dim) {
            const int64_t out_stride = int64_t{p.num_heads} * p.head_dim;
            store_four(static_cast<T*>(p.out) + unit.address(p, row, out_stride) + column, sums,
                       1.0f / weights);
        }
    }
    __syncthreads();  // before the next item writes join
}

// Whether this CTA is the last of the unit's chunks: then the others' sums are visible. The counter
// is left at 0 for the next launch.
template <typename C>
__device__ __forceinline__ bool is_last_chunk(const DecodeParams& p, DecodeSmem<C>& s,
                                              const RowUnit<C>& unit, const PagedItem& item) {
    __threadfence();  // pairs with the fence below, of the CTA that is last
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* counter = p.counters + int64_t{item.unit} * p.num_kv_heads + unit.kv_head;
        const auto last = static_cast<unsigned>(item.num_chunks - 1);
        s.is_last = atomicInc(counter, last) == last;
    }
    __syncthreads();
    const bool is_last = s.is_last != 0;
    if (is_last) __threadfence();
    return is_last;
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas)
    decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    auto& s = *reinterpret_cast<DecodeSmem<C>*>(smem);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const auto ring = static_cast<uint32_t>(__cvta_generic_to_shared(s.ring[warp]));
    constexpr uint32_t kStageBytes = 2 * C::kTileBytes;
    wait_for_prior_kernel();
    release_next_kernel();
    const ItemList list(p);
    Fetcher<C> fetcher(p, list, warp, lane);
    for (int i = 0; i < C::kStages - 1; ++i) fetcher.fetch(ring + i * kStageBytes);
    RowUnit<C> unit;
    int stage = 0;
    for (int index = blockIdx.x; index < list.total; index += gridDim.x) {
        const PagedItem item = list.item(index);
        unit.start(p, item, list.kv_head(index), lane);
        for (int key = item.first_key + warp * kStepKeys; key < item.end_key;
             key += C::kWarps * kStepKeys) {
            wait_for_copies<C::kStages - 2>();
            __syncwarp();  // every lane's copies are there, and the stage before has been read
            const int free = stage == 0 ? C::kStages - 1 : stage - 1;
            fetcher.fetch(ring + free * kStageBytes);
            unit.attend(ring + stage * kStageBytes, key, p.scale, lane);
            stage = stage + 1 == C::kStages ? 0 : stage + 1;
        }
        join_warps(p, s, unit, item, warp, lane);
        if (item.num_chunks > 1 && is_last_chunk(p, s, unit, item)) join_chunks(p, s, unit, item);
    }
}

}  // namespace bytetx::paged
