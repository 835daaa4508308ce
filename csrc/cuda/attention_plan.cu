// The plan of a batch: which rows each tile owns and which keys they see, from cu_seqlens alone, on
// the device, so that no length travels to the host and a captured graph serves any lengths.
//
// Tiles hold whole sequences as long as these fit, one behind the other. A sequence that does not
// fit opens a new tile; one longer than a tile fills tiles of its own and leaves its rest open for
// the next. Against cutting every tile_rows rows regardless, tiles see fewer foreign keys: at a
// mean length of 20 one key tile instead of two, and at 102 to 512 tokens 141 instead of 157 us
// (H200, 12 heads of 64, f16, 2026-11-21).
//
// With batch_invariant every sequence opens a tile, and none shares one: which keys meet in a step,
// and so every bit, depends on the sequence alone.
//
// That packing is sequential, but a tile that opens at a sequence decides alone where the next one
// opens: CTA 0 lets one thread a sequence find that place, doubles these jumps until they span a
// block of sequences, and marks what the first sequence reaches. A batch of few sequences takes few
// rounds (2 us for one, 8 for 2048; H200). Then it orders the tiles: those of long sequences first,
// the longest first, so that the last CTAs to finish are short ones; in the order of rows else,
// which DRAM prefers (76 instead of 83 us at mean 20). Tiles of one sequence stay together, so that
// its keys stay in L2: among 16 causal sequences of 2048 tokens, the longest tiles first would read
// all keys from DRAM (860 instead of 489 us, together with the uniform descriptors of
// attention_tile.cuh). The other CTAs find each row's sequence by bisection. Standard parts
// (pointer jumping, counting sort); bound by latency.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/launch.cuh"
#include "cuda/attention_plan.cuh"
#include "ops.h"

namespace bytetx {
namespace attention {
namespace {

constexpr int kThreads = 1024;  // and sequences of a block
constexpr int kLevels = 10;     // levels of jumps: 2^10 positions
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 32;    // quarters of an octave of lengths; the last one has the short ones
constexpr int kRowsBits = 16;   // low bits of a tile's second word until it is sorted; above: rank
constexpr int kLongKeys = 256;  // a tile that sees more is worth ordering

struct PlanKernelParams {
    const int* cu_seqlens;
    PlanView plan;
    int batch_size;
    int num_rows;  // rows of row_bounds
    int tile_rows;
    int window;
    bool causal;
    bool batch_invariant;
};

// How early the tiles of a sequence run: 0 where it is short.
__device__ int rank_of(int length) {
    if (length <= kLongKeys) return 0;
    const int octave = 31 - __clz(length);
    return min(1 + 4 * (octave - 8) + (length >> (octave - 2) & 3), kBuckets - 1);
}

// The tiles that open at one sequence: whole ones, and one that takes in what fits behind it.
struct Opening {
    int start, stop;  // the sequence's rows
    int full;         // whole tiles before the last one
    int next;         // the sequence that opens the tile after
    int end;          // one past the last row of the last tile

    __device__ int num_tiles() const { return stop > start ? full + 1 : 0; }
};

__device__ Opening find_opening(const PlanKernelParams& p, int sequence) {
    const int start = p.cu_seqlens[sequence], stop = p.cu_seqlens[sequence + 1];
    if (start == stop) return {start, stop, 0, sequence + 1, stop};
    // Divides only where it must: the division costs more than all the rest.
    const int full = stop - start <= p.tile_rows ? 0 : (stop - start - 1) / p.tile_rows;
    if (p.batch_invariant) return {start, stop, full, sequence + 1, stop};
    const int limit = start + (full + 1) * p.tile_rows;
    int low = sequence + 1, step = 1;  // the sequences before `low` fit
    while (low + step <= p.batch_size && p.cu_seqlens[low + step] <= limit) {
        low += step;
        step *= 2;
    }
    for (; step > 0; step /= 2) {
        if (low + step <= p.batch_size && p.cu_seqlens[low + step] <= limit) low += step;
    }
    return {start, stop, full, low, p.cu_seqlens[low]};
}

__device__ void write_tiles(const PlanKernelParams& p, const Opening& o, int4* to) {
    const int rank = rank_of(o.stop - o.start) << kRowsBits;
    for (int i = 0; i <= o.full; ++i) {
        const int row = o.start + i * p.tile_rows, end = i < o.full ? o.stop : o.end;
        const int rows = min(p.tile_rows, end - row);
        int first_key = o.start, last_key = end;
        if (p.window > 0) {
            first_key = max(first_key, row + 1 - p.window);
            last_key = min(last_key, row + rows - 1 + p.window);
        }
        if (p.causal) last_key = min(end, row + rows);
        to[i] = {row, rows | rank, first_key, last_key};
    }
}

// Exclusive prefix sum over the CTA, the total in `total`; reads scratch until the next barrier.
__device__ int prefix_sum(int value, int (&scratch)[kWarps], int& total) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const auto scan = [&](int sum) {  // inclusive, over the warp
        for (int offset = 1; offset < 32; offset *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += left;
        }
        return sum;
    };
    const int sum = scan(value);
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    const int warps = scan(scratch[lane]);
    total = __shfl_sync(0xffffffffu, warps, 31);
    return sum - value + __shfl_sync(0xffffffffu, warps - scratch[lane], warp);
}

// Whether a tile opens at the thread's sequence, when one opens at the first of the block. next: of
// the block's sequences, kThreads or more where it lies beyond; count: sequences of the block.
__device__ bool is_reached(int next, int count) {
    __shared__ uint16_t jumps[kLevels][kThreads];
    __shared__ bool is_marked[2][kThreads];  // before and after a level
    const int thread = static_cast<int>(threadIdx.x);
    int num_levels = 0, to = min(next, kThreads);
    while (num_levels < kLevels && 1 << num_levels < count) {
        jumps[num_levels][thread] = static_cast<uint16_t>(to);
        __syncthreads();
        if (to < kThreads) to = jumps[num_levels][to];
        ++num_levels;
    }
    bool is_mine = thread == 0;
    is_marked[0][thread] = is_marked[1][thread] = is_mine;
    __syncthreads();
    for (int level = num_levels - 1; level >= 0; --level) {
        bool* after = is_marked[level % 2];
        const int from = jumps[level][thread];
        if (is_mine) after[thread] = true;
        if (is_mine && from < kThreads) after[from] = true;
        __syncthreads();
        is_mine = after[thread];
    }
    return is_mine;
}

// A stable counting sort, highest rank first: each warp counts its run of tiles, then places it.
__device__ void order_tiles(const PlanKernelParams& p, int used, int (&scratch)[kWarps]) {
    __shared__ int heads[kBuckets * kWarps];  // head of each warp's part of each bucket
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int share = (used + kThreads - 1) / kThreads * 32;
    const int first = min(warp * share, used), last = min(first + share, used);
    static_assert(kBuckets * kWarps == kThreads);
    const auto tile_at = [&](int i) { return p.plan.unsorted[p.causal ? used - 1 - i : i]; };
    const auto visit = [&](const auto& place) {
        for (int i = first + lane; i < last + lane; i += 32) {
            const int4 tile = i < last ? tile_at(i) : int4{0, kBuckets << kRowsBits, 0, 0};
            const int bucket = kBuckets - 1 - (tile.y >> kRowsBits);
            const unsigned peers = __match_any_sync(0xffffffffu, bucket);
            const int rank = __popc(peers & ((1u << lane) - 1));
            if (i < last) place(tile, heads[bucket * kWarps + warp] + rank);
            __syncwarp();  // all have read the head
            if (i < last && rank == 0) heads[bucket * kWarps + warp] += __popc(peers);
            __syncwarp();
        }
    };
    heads[thread] = 0;
    __syncthreads();
    visit([](int4, int) {});
    __syncthreads();
    int total;
    const int head = prefix_sum(heads[thread], scratch, total);
    heads[thread] = head;
    __syncthreads();
    visit([&](int4 tile, int to) {
        tile.y &= (1 << kRowsBits) - 1;
        p.plan.tiles[to] = tile;
    });
}

__device__ void make_tiles(const PlanKernelParams& p) {
    __shared__ int scratch[kWarps];
    __shared__ int entry;  // the sequence that opens the next block's first tile
    const int thread = static_cast<int>(threadIdx.x);
    bool is_long = false;
    for (int i = thread; i < p.batch_size; i += kThreads) {
        is_long |= p.cu_seqlens[i + 1] - p.cu_seqlens[i] > kLongKeys;
    }
    const bool is_ordered = __syncthreads_or(is_long);
    int4* tiles = is_ordered ? p.plan.unsorted : p.plan.tiles;
    int used = 0;
    for (int first = 0; first < p.batch_size; first = entry) {
        const int count = min(kThreads, p.batch_size - first);
        Opening opening{0, 0, 0, p.batch_size, 0};
        if (thread < count) opening = find_opening(p, first + thread);
        const bool opens = is_reached(opening.next - first, count) && thread < count;
        if (opens && opening.next >= first + count) entry = opening.next;
        int total;
        const int index = prefix_sum(opens ? opening.num_tiles() : 0, scratch, total);
        if (opens && opening.num_tiles() > 0) write_tiles(p, opening, tiles + used + index);
        used += total;
        __syncthreads();  // entry and the tiles are written, scratch is read
    }
    if (thread == 0) {
        *p.plan.used_tiles = used;
        *p.plan.counters = {0, 0};
    }
    if (is_ordered) order_tiles(p, used, scratch);
}

__device__ int2 find_bounds(const PlanKernelParams& p, int row) {
    int low = 0, high = p.batch_size;  // cu_seqlens[low] <= row < cu_seqlens[high]
    const int end = p.cu_seqlens[high];
    if (row >= end) return {end, end};
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (p.cu_seqlens[middle] <= row ? low : high) = middle;
    }
    return {p.cu_seqlens[low], p.cu_seqlens[high]};
}

__global__ void __launch_bounds__(kThreads, 1)
    plan_kernel(const __grid_constant__ PlanKernelParams p) {
    release_next_kernel();
    wait_for_prior_kernel();
    if (blockIdx.x == 0) return make_tiles(p);
    const int64_t row = int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
    if (row < p.num_rows) p.plan.row_bounds[row] = find_bounds(p, static_cast<int>(row));
}

}  // namespace
}  // namespace attention

int64_t attention_plan_bytes(int64_t batch_size, int64_t total_tokens, int32_t tile_rows,
                             bool batch_invariant) {
    const int64_t tiles =
        attention::max_tiles(batch_size, total_tokens, tile_rows, batch_invariant);
    const int64_t rows = attention::padded_rows(total_tokens, tile_rows);
    return sizeof(int4) * (1 + 2 * tiles) + sizeof(int2) * rows;
}

void attention_plan(const AttentionPlanParams& p, const Launch& launch) {
    using namespace attention;
    const int64_t needed =
        attention_plan_bytes(p.batch_size, p.total_tokens, p.tile_rows, p.batch_invariant);
    if (p.batch_size <= 0 || p.total_tokens <= 0 || p.total_tokens > INT32_MAX / 2 ||
        p.tile_rows <= 0 || p.tile_rows >= 1 << kRowsBits || p.plan_bytes < needed) {
        throw std::invalid_argument(
            "attention_plan needs batch_size > 0, 0 < total_tokens < 2^30 and a plan of " +
            std::to_string(needed) + " bytes; got " + std::to_string(p.batch_size) + ", " +
            std::to_string(p.total_tokens) + " and " + std::to_string(p.plan_bytes));
    }
    const DeviceGuard guard(launch.device);
    const int64_t rows = padded_rows(p.total_tokens, p.tile_rows);
    const int64_t tiles = max_tiles(p.batch_size, p.total_tokens, p.tile_rows, p.batch_invariant);
    const PlanKernelParams params{p.cu_seqlens,
                                  view_plan(p.plan, tiles),
                                  static_cast<int>(p.batch_size),
                                  static_cast<int>(rows),
                                  p.tile_rows,
                                  p.window,
                                  p.causal,
                                  p.batch_invariant};
    const auto num_ctas = static_cast<unsigned>(1 + (rows + kThreads - 1) / kThreads);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    launch_kernel(plan_kernel, LaunchShape{num_ctas, kThreads, 0, stream}, params);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
