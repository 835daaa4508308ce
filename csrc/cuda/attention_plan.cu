// The plan of a batch: which rows each tile owns and which keys they see, from cu_seqlens alone, on
// the device, so that no length travels to the host and a captured graph serves any lengths.
//
// Tiles hold whole sequences as long as these fit, one behind the other. A sequence that does not
// fit opens a new tile; one longer than a tile fills tiles of its own and leaves its rest open for
// the next. Against cutting every tile_rows rows regardless, tiles see fewer foreign keys: at a
// mean length of 20 one key tile instead of two, and at 102 to 512 tokens 141 instead of 157 us
// (H200, 12 heads of 64, f16, 2026-11-21).
//
// That packing is sequential, but a tile's fill before a sequence is all that the past leaves
// behind, so a chunk of sequences is a function from fill to fill: CTA 0 tabulates it for every
// chunk and fill at once, walks the chunks, and lets one thread a chunk write its tiles. Then it
// orders them: those of long sequences first, the longest first, so that the last CTAs to finish
// are short ones; in the order of rows otherwise, which DRAM prefers (76 instead of 83 us at mean
// 20). Tiles of one sequence stay together, so that its keys stay in L2: among 16 causal sequences
// of 2048 tokens, the longest tiles first would read all keys from DRAM (860 instead of 489 us,
// together with the uniform descriptors of attention_tile.cuh). The other CTAs find each row's
// sequence by bisection. Standard parts; bound by latency.

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

constexpr int kThreads = 1024;
constexpr int kEntries = 8192;  // of the table [chunk][fill]: 40 KB of shared memory
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 32;  // of lengths, quarters of an octave; the last one: short
constexpr int kRowsBits = 16;  // of a tile's second word before it is sorted; its bucket is above
constexpr int kLongKeys = 256;  // a tile that sees more is worth ordering

struct PlanKernelParams {
    const int* cu_seqlens;
    PlanView plan;
    int batch_size;
    int num_rows;  // of row_bounds
    int tile_rows;
    int window;
    bool causal;
};

// The open tile and how sequences go into it.
struct Packer {
    int tile_rows;
    int fill;  // rows of the open tile; 0: none is open

    __device__ bool fits(int length) const { return fill > 0 && fill + length <= tile_rows; }
    // Returns how many tiles it opened.
    __device__ int add(int length) {
        if (length == 0) return 0;
        const bool joins = fits(length);
        // Divides only where it must: the division costs more than all the rest.
        const int full = joins || length <= tile_rows ? 0 : (length - 1) / tile_rows;
        fill = joins ? fill + length : length - full * tile_rows;
        if (fill == tile_rows) fill = 0;
        return joins ? 0 : full + 1;
    }
};

__device__ int bucket_of(int keys) {
    if (keys <= kLongKeys) return kBuckets - 1;
    const int octave = 31 - __clz(keys);
    const int quarters = 4 * (octave - 8) + (keys >> (octave - 2) & 3);
    return max(kBuckets - 2 - quarters, 0);
}

__device__ int4 make_tile(const PlanKernelParams& p, int row, int rows, int begin, int end) {
    const int bucket = bucket_of(end - begin);
    if (p.window > 0) begin = max(begin, row + 1 - p.window);
    if (p.causal) end = min(end, row + rows);
    return {row, rows | bucket << kRowsBits, begin, end};
}

// Writes the tiles that the sequences first .. last - 1 open; the last of them takes in what fits
// of the sequences after. fill: rows of the tile that is open before `first`.
__device__ void write_tiles(const PlanKernelParams& p, int first, int last, int fill, int index) {
    Packer packer{p.tile_rows, fill};
    int4* to = p.plan.unsorted + index;
    int row = -1, begin = 0, end = 0;  // of the open tile, where it is this chunk's
    for (int i = first; i < p.batch_size; ++i) {
        const int start = p.cu_seqlens[i], stop = p.cu_seqlens[i + 1], length = stop - start;
        if (length == 0) continue;
        if (row < 0 && i >= last) return;
        if (packer.fits(length)) {
            end = stop;
        } else {
            if (row >= 0) *to++ = make_tile(p, row, end - row, begin, end);
            if (i >= last) return;
            row = begin = start;
            end = stop;
            for (; stop - row > p.tile_rows; row += p.tile_rows) {
                *to++ = make_tile(p, row, p.tile_rows, begin, end);
            }
        }
        packer.add(length);
        if (packer.fill == 0) {
            if (row >= 0) *to++ = make_tile(p, row, end - row, begin, end);
            row = -1;
        }
    }
    if (row >= 0) *to++ = make_tile(p, row, end - row, begin, end);
}

// Exclusive prefix sum over the CTA, and the total in `total`.
__device__ int prefix_sum(int value, int* scratch, int& total) {
    const int thread = static_cast<int>(threadIdx.x);
    scratch[thread] = value;
    __syncthreads();
    for (int offset = 1; offset < kThreads; offset *= 2) {
        const int left = thread >= offset ? scratch[thread - offset] : 0;
        __syncthreads();  // everybody has read
        scratch[thread] += left;
        __syncthreads();  // everybody has written
    }
    total = scratch[kThreads - 1];
    return scratch[thread] - value;
}

// A stable counting sort by bucket: each warp counts its run of tiles, then places it.
__device__ void order_tiles(const PlanKernelParams& p, int used, int* scratch) {
    __shared__ int heads[kBuckets * kWarps];  // of each bucket, each warp's part of it
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int share = (used + kThreads - 1) / kThreads * 32;
    const int first = min(warp * share, used), last = min(first + share, used);
    static_assert(kBuckets * kWarps == kThreads);
    const auto tile_at = [&](int i) { return p.plan.unsorted[p.causal ? used - 1 - i : i]; };
    const auto visit = [&](const auto& place) {
        for (int i = first + lane; i < last + lane; i += 32) {
            const int4 tile = i < last ? tile_at(i) : int4{0, -1 << kRowsBits, 0, 0};
            const int bucket = tile.y >> kRowsBits;
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
    __shared__ uint8_t next_fill[kEntries];
    __shared__ int opened[kEntries];  // and order_tiles' scratch, later
    __shared__ uint8_t start_fill[kThreads];
    __shared__ int start_tile[kThreads + 1];
    const int thread = static_cast<int>(threadIdx.x);
    const int num_chunks = kEntries / p.tile_rows;  // at most kThreads: tiles have 8 rows or more
    const int share = (p.batch_size + num_chunks - 1) / num_chunks;
    const auto bound = [&](int chunk) { return min(chunk * share, p.batch_size); };
    for (int entry = thread; entry < num_chunks * p.tile_rows; entry += kThreads) {
        const int chunk = entry / p.tile_rows, last = bound(chunk + 1);
        Packer packer{p.tile_rows, entry % p.tile_rows};
        int count = 0;
#pragma unroll 8  // lengths do not depend on the fill: their loads run ahead
        for (int i = bound(chunk); i < last; ++i) {
            count += packer.add(p.cu_seqlens[i + 1] - p.cu_seqlens[i]);
        }
        next_fill[entry] = static_cast<uint8_t>(packer.fill);
        opened[entry] = count;
    }
    __syncthreads();
    if (thread == 0) {
        int fill = 0, tile = 0;
        for (int chunk = 0; chunk < num_chunks; ++chunk) {
            start_fill[chunk] = static_cast<uint8_t>(fill);
            start_tile[chunk] = tile;
            const int entry = chunk * p.tile_rows + fill;
            tile += opened[entry];
            fill = next_fill[entry];
        }
        start_tile[num_chunks] = tile;
        *p.plan.used_tiles = tile;
        *p.plan.counters = {0, 0};
    }
    __syncthreads();
    if (thread < num_chunks) {
        write_tiles(p, bound(thread), bound(thread + 1), start_fill[thread], start_tile[thread]);
    }
    __syncthreads();  // the unsorted tiles are written
    order_tiles(p, start_tile[num_chunks], opened);
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

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ PlanKernelParams p) {
    release_next_kernel();
    wait_for_prior_kernel();
    if (blockIdx.x == 0) return make_tiles(p);
    const int64_t row = int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
    if (row < p.num_rows) p.plan.row_bounds[row] = find_bounds(p, static_cast<int>(row));
}

}  // namespace
}  // namespace attention

int64_t attention_plan_bytes(int64_t batch_size, int64_t total_tokens, int32_t tile_rows) {
    const int64_t tiles = attention::max_tiles(batch_size, total_tokens, tile_rows);
    const int64_t rows = attention::padded_rows(total_tokens, tile_rows);
    return sizeof(int4) * (1 + 2 * tiles) + sizeof(int2) * rows;
}

void attention_plan(const AttentionPlanParams& p, const Launch& launch) {
    using namespace attention;
    const int64_t needed = attention_plan_bytes(p.batch_size, p.total_tokens, p.tile_rows);
    if (p.batch_size <= 0 || p.total_tokens <= 0 || p.total_tokens > INT32_MAX / 2 ||
        p.tile_rows < kEntries / kThreads || p.tile_rows >= 256 || p.plan_bytes < needed) {
        throw std::invalid_argument(
            "attention_plan needs batch_size > 0, 0 < total_tokens < 2^30 and a plan of " +
            std::to_string(needed) + " bytes; got " + std::to_string(p.batch_size) + ", " +
            std::to_string(p.total_tokens) + " and " + std::to_string(p.plan_bytes));
    }
    const DeviceGuard guard(launch.device);
    const int64_t rows = padded_rows(p.total_tokens, p.tile_rows);
    const int64_t tiles = max_tiles(p.batch_size, p.total_tokens, p.tile_rows);
    const PlanKernelParams params{p.cu_seqlens,
                                  view_plan(p.plan, tiles),
                                  static_cast<int>(p.batch_size),
                                  static_cast<int>(rows),
                                  p.tile_rows,
                                  p.window,
                                  p.causal};
    const auto num_ctas = static_cast<unsigned>(1 + (rows + kThreads - 1) / kThreads);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    launch_kernel(plan_kernel, LaunchShape{num_ctas, kThreads, 0, stream}, params);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
