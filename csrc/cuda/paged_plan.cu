// The plan of a step over paged keys: decode items and prefill tiles, from lengths on the device,
// so that no length travels to the host and a captured graph serves any lengths.
//
// One CTA: a thread a sequence counts what its sequence needs, a scan over the CTA gives its
// offsets, and the thread writes its items. Items and tiles are sorted into buckets by their number
// of keys, longest first, because CTAs take them one after another and should end with a short one.
// The order within a bucket is arbitrary and changes no result. Bound by latency; made once a step
// and shared by all layers.

#include <algorithm>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cache_ops.h"
#include "common/check.cuh"
#include "common/launch.cuh"
#include "cuda/paged_plan.cuh"

namespace bytetx {
namespace paged {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 512;       // buckets of items and of tiles, by number of keys
constexpr int kOctaveBuckets = 32;  // buckets of items from some keys to twice as many

struct PlanKernelParams {
    const int* cu_seqlens;
    const int* kv_seqlens;
    PlanView plan;
    PlanSizes sizes;
    bool has_items;
    int batch_size;
    int group;
    int num_kv_heads;
    int window;
    int tile_tokens;
    int max_keys;
    bool batch_invariant;
    DecodeCtas ctas;
};

// Need of one sequence, or of all before it.
struct Need {
    int units, items, partial_rows;

    __device__ Need operator+(const Need& other) const {
        return {units + other.units, items + other.items, partial_rows + other.partial_rows};
    }
};

__device__ Need shuffle_up(const Need& need, int by) {
    return {__shfl_up_sync(~0u, need.units, by), __shfl_up_sync(~0u, need.items, by),
            __shfl_up_sync(~0u, need.partial_rows, by)};
}

// The sum of the needs of all threads before this one; `total` gains that of all threads.
__device__ Need exclusive_scan(const Need& own, Need& total) {
    __shared__ Need warp_sums[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    Need sum = own;
    for (int by = 1; by < 32; by *= 2) {
        const Need below = shuffle_up(sum, by);
        if (lane >= by) sum = sum + below;
    }
    __syncthreads();  // pairs with the reads of the scan before
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    Need before = total;
    for (int i = 0; i < kWarps; ++i) {
        if (i < warp) before = before + warp_sums[i];
        total = total + warp_sums[i];
    }
    return before +
           Need{sum.units - own.units, sum.items - own.items, sum.partial_rows - own.partial_rows};
}

// One sequence of the step.
struct Piece {
    int first_token, tokens, keys;
    int first_visible;  // that any row sees
    int first_key;
    int chunk_keys, num_chunks;
    bool is_tiled;

    __device__ Piece(const PlanKernelParams& p, int sequence) {
        first_token = tokens = keys = first_visible = first_key = chunk_keys = num_chunks = 0;
        is_tiled = false;
        if (sequence >= p.batch_size) return;
        first_token = p.cu_seqlens[sequence];
        tokens = p.cu_seqlens[sequence + 1] - first_token;
        keys = p.kv_seqlens[sequence];
        if (tokens <= 0 || keys < tokens) tokens = 0;
        if (tokens == 0) return;
        is_tiled = p.tile_tokens > 0 && (tokens > 1 || p.batch_invariant);
        if (p.window > 0) first_visible = max(0, keys - tokens + 1 - p.window);
        first_key = first_visible / kStepKeys * kStepKeys;
        chunk_keys = chunk_length(keys - first_key);
        num_chunks = (keys - first_key + chunk_keys - 1) / chunk_keys;
    }

    __device__ int num_tiles(const PlanKernelParams& p) const {
        return (tokens + p.tile_tokens - 1) / p.tile_tokens;
    }

    __device__ int num_units(const PlanKernelParams& p) const {
        if (tokens == 0 || is_tiled || !p.has_items) return 0;
        return (tokens * p.group + kUnitRows - 1) / kUnitRows;
    }
    __device__ int keys_to_read() const { return keys - first_key; }

    __device__ Need need(const PlanKernelParams& p, bool is_split) const {
        const int units = num_units(p);
        if (units == 0) return {};
        if (!is_split) return {units, units, 0};
        return {units, units * num_chunks, tokens * p.group * num_chunks};
    }
};

__device__ int clamp_to_int(unsigned long long value) {
    constexpr unsigned long long kMost = INT_MAX;
    return static_cast<int>(min(value, kMost));
}

// Which sequences' chunks are items of their own: the long ones, which alone would take longer than
// the memory takes for all, and in a last round that leaves most CTAs idle all. Chunks of other
// sequences are read by one CTA, one after another: sums that CTAs exchange through memory cost far
// more than their bytes (64 sequences of 4096 keys, heads 32/8, H100: 366 us in chunks of 1024, 351
// without what is exchanged).
struct Split {
    int max_keys;    // most keys of a sequence that is not split
    int first_tail;  // the first sequence of such a last round

    // units, keys: sums over all sequences, of one key head.
    __device__ Split(const PlanKernelParams& p, int units, unsigned long long keys) {
        max_keys = clamp_to_int(keys * p.num_kv_heads / p.ctas.full_rate);
        const int64_t all = int64_t{units} * p.num_kv_heads, rest = all % p.ctas.all;
        const bool has_tail = all > p.ctas.all && rest > 0 && rest < p.ctas.full_rate;
        first_tail = has_tail ? static_cast<int>((all - rest) * p.batch_size / all) : INT_MAX;
    }

    __device__ bool operator()(const Piece& piece, int sequence) const {
        return piece.num_chunks > 1 && (piece.keys_to_read() > max_keys || sequence >= first_tail);
    }
};

__device__ void write_items(const PlanKernelParams& p, const Piece& piece, bool is_split,
                            int sequence, Need at) {
    const int rows = piece.tokens * p.group;
    const int num_items = is_split ? piece.num_chunks : 1;  // items per unit
    const int item_keys = is_split ? piece.chunk_keys : piece.keys_to_read();
    for (int row = 0; row < rows; row += kUnitRows) {
        for (int chunk = 0; chunk < num_items; ++chunk) {
            const int first = piece.first_key + chunk * item_keys;
            if (at.items >= p.sizes.items) return;  // only where a length exceeds its bound
            p.plan.items[at.items++] = {sequence,
                                        piece.first_token,
                                        row,
                                        min(rows - row, kUnitRows),
                                        piece.keys - piece.tokens,
                                        piece.first_visible,
                                        first,
                                        min(first + item_keys, piece.keys),
                                        piece.chunk_keys,
                                        chunk,
                                        piece.num_chunks,
                                        at.partial_rows,
                                        at.units};
        }
        at.partial_rows += is_split ? min(rows - row, kUnitRows) * piece.num_chunks : 0;
        ++at.units;
    }
}

// Calls f(tile) for each tile of a piece, that of the most keys first.
template <typename F>
__device__ void for_each_tile(const PlanKernelParams& p, const Piece& piece, int sequence, F&& f) {
    const int past = piece.keys - piece.tokens, last = (piece.tokens - 1) / p.tile_tokens;
    for (int token = last * p.tile_tokens; token >= 0; token -= p.tile_tokens) {
        const int tokens = min(p.tile_tokens, piece.tokens - token);
        const int position = past + token, end = position + tokens;
        const int first = p.window > 0 ? max(0, position + 1 - p.window) : 0;
        f(PagedTile{sequence, piece.first_token + token, tokens * p.group, position, first, end});
    }
}

// Bucket of a piece's items; that of the longest is 0.
__device__ int item_bucket(const Piece& piece, bool is_split) {
    constexpr float kFewKeys = 6.0f;  // up to 64 they are all alike
    const int keys = is_split ? min(piece.chunk_keys, piece.keys_to_read()) : piece.keys_to_read();
    const float octaves = fmaxf(__log2f(static_cast<float>(keys)) - kFewKeys, 0.0f);
    return kBuckets - 1 - min(static_cast<int>(octaves * kOctaveBuckets), kBuckets - 1);
}

// Bucket by the keys that a piece's rows see; that of the most is 0.
__device__ int tile_bucket(const PlanKernelParams& p, const Piece& piece) {
    const float length =
        static_cast<float>(piece.keys - piece.first_visible) / static_cast<float>(p.max_keys);
    return kBuckets - 1 - min(static_cast<int>(length * kBuckets), kBuckets - 1);
}

// Where each bucket begins, given how many entries a piece has, count(piece, sequence), and in
// which bucket they are.
template <typename Count, typename Bucket>
__device__ void find_starts(const PlanKernelParams& p, int* starts, Count&& count,
                            Bucket&& bucket) {
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) starts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < p.batch_size; i += kThreads) {
        const Piece piece(p, i);
        const int entries = count(piece, i);
        if (entries > 0) atomicAdd(&starts[bucket(piece, i)], entries);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        constexpr int kOfLane = kBuckets / 32;
        int* own = starts + threadIdx.x * kOfLane;
        int sum = 0;
        for (int i = 0; i < kOfLane; ++i) sum += own[i];
        int before = sum;
        for (int by = 1; by < 32; by *= 2) {
            const int below = __shfl_up_sync(~0u, before, by);
            if (static_cast<int>(threadIdx.x) >= by) before += below;
        }
        before -= sum;
        for (int i = 0; i < kOfLane; ++i) {
            const int entries = own[i];
            own[i] = before;
            before += entries;
        }
    }
    __syncthreads();
}

// All tiles, those of the longest sequences first, so that the last CTAs to finish are short; those
// of one sequence next to one another, so that the CTAs that run at once share its keys in L2: in
// the order of their own keys alone, all keys would come from DRAM (16 pieces of 512 tokens after
// 4096, 16/8 heads: 627 us). Returns how many there are, and adds their keys to `keys`.
__device__ int sort_tiles(const PlanKernelParams& p, int& keys) {
    __shared__ int starts[kBuckets];
    find_starts(
        p, starts, [&](const Piece& piece, int) { return piece.is_tiled ? piece.num_tiles(p) : 0; },
        [&](const Piece& piece, int) { return tile_bucket(p, piece); });
    for (int i = threadIdx.x; i < p.batch_size; i += kThreads) {
        const Piece piece(p, i);
        if (!piece.is_tiled) continue;
        int at = atomicAdd(&starts[tile_bucket(p, piece)], piece.num_tiles(p));
        int of_piece = 0;
        for_each_tile(p, piece, i, [&](const PagedTile& tile) {
            of_piece += tile.end_key - tile.first_visible + kTileStart;
            if (at < p.sizes.tiles) p.plan.tiles[at] = tile;
            ++at;
        });
        atomicAdd(&keys, of_piece);
    }
    __syncthreads();
    return starts[kBuckets - 1];  // one past the last bucket's tiles
}

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ PlanKernelParams p) {
    wait_for_prior_kernel();
    __shared__ int starts[kBuckets];  // first item of each bucket
    __shared__ int tile_keys, num_units;
    __shared__ unsigned long long item_keys;
    if (threadIdx.x == 0) {
        item_keys = 0;
        tile_keys = num_units = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.batch_size; i += kThreads) {
        const Piece piece(p, i);
        const int units = piece.num_units(p);
        if (units == 0) continue;
        atomicAdd(&num_units, units);
        atomicAdd(&item_keys, static_cast<unsigned long long>(units) * piece.keys_to_read());
    }
    __syncthreads();
    const Split is_split(p, num_units, item_keys);
    const auto need_of = [&](const Piece& piece, int i) {
        return piece.need(p, is_split(piece, i));
    };
    if (num_units > 0) {
        find_starts(
            p, starts, [&](const Piece& piece, int i) { return need_of(piece, i).items; },
            [&](const Piece& piece, int i) { return item_bucket(piece, is_split(piece, i)); });
    }
    Need total{};
    for (int first = 0; first < p.batch_size; first += kThreads) {
        const int sequence = first + static_cast<int>(threadIdx.x);
        const Piece piece(p, sequence);
        const Need need = need_of(piece, sequence);
        Need at = exclusive_scan(need, total);
        if (need.items == 0) continue;
        const bool splits = is_split(piece, sequence);
        at.items = atomicAdd(&starts[item_bucket(piece, splits)], need.items);
        write_items(p, piece, splits, sequence, at);
    }
    const int num_tiles = p.sizes.tiles > 0 ? sort_tiles(p, tile_keys) : 0;
    __syncthreads();  // the sums of keys
    const int64_t num_counters = min(int64_t{total.units} * p.num_kv_heads, p.sizes.counters);
    for (int64_t i = threadIdx.x; i < num_counters; i += kThreads) p.plan.counters[i] = 0;
    if (threadIdx.x == 0) {
        *p.plan.header = {static_cast<int>(min(int64_t{total.items}, p.sizes.items)),
                          static_cast<int>(min(int64_t{num_tiles}, p.sizes.tiles)),
                          {},
                          clamp_to_int(item_keys),
                          tile_keys};
    }
    const int64_t cleared = min(p.sizes.items, int64_t{kClearedItems});
    for (int64_t i = total.items + threadIdx.x; i < cleared; i += kThreads) p.plan.items[i] = {};
    // Only now, and behind a fence: attention that reads early takes the plan without a wait.
    __threadfence();
    __syncthreads();
    release_next_kernel();
}

}  // namespace
}  // namespace paged

int32_t paged_tile_tokens(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
    constexpr int kWarpgroupRows = 64;
    return paged::prefill_warpgroups(head_dim) * (kWarpgroupRows / (num_heads / num_kv_heads));
}

int64_t paged_plan_bytes(const PagedPlanParams& p) {
    const paged::PlanSizes sizes = paged::plan_sizes(p);
    const int64_t bytes = sizeof(paged::PagedHeader) + sizes.items * sizeof(paged::PagedItem) +
                          sizes.tiles * sizeof(paged::PagedTile) +
                          sizes.counters * sizeof(unsigned);
    return (bytes + paged::kAlignment - 1) / paged::kAlignment * paged::kAlignment;
}

void paged_plan(const PagedPlanParams& p, const Launch& launch) {
    if (p.batch_size == 0 || p.total_tokens == 0) return;
    if (p.plan_bytes < paged_plan_bytes(p)) {
        throw std::invalid_argument("paged_plan needs " + std::to_string(paged_plan_bytes(p)) +
                                    " bytes, got " + std::to_string(p.plan_bytes));
    }
    if (paged::uses_clusters(p) && p.max_seqlen <= 1) return;  // nobody would read it
    if (p.batch_invariant && p.tile_tokens <= 0) {
        throw std::invalid_argument("paged_plan needs tile_tokens > 0 where it is batch-invariant");
    }
    const DeviceGuard guard(launch.device);
    const paged::PlanSizes sizes = paged::plan_sizes(p);
    const paged::PlanKernelParams params{p.cu_seqlens,
                                         p.kv_seqlens,
                                         paged::view_plan(p.plan, sizes),
                                         sizes,
                                         !paged::uses_clusters(p) && !p.batch_invariant,
                                         static_cast<int>(p.batch_size),
                                         p.num_heads / p.num_kv_heads,
                                         p.num_kv_heads,
                                         p.window,
                                         p.tile_tokens,
                                         std::max(p.max_kv_seqlen, 1),
                                         p.batch_invariant,
                                         paged::decode_ctas(p, num_sms())};
    const LaunchShape shape{1, paged::kThreads, 0, static_cast<cudaStream_t>(launch.stream)};
    launch_kernel(paged::plan_kernel, shape, params);
}

}  // namespace bytetx
