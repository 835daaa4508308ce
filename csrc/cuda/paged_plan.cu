// The plan of a step over paged keys: decode items and prefill tiles, from lengths on the device, so
// that no length travels to the host and a captured graph serves any lengths.
//
// One CTA: a thread a sequence counts what its sequence needs, a scan over the CTA places it, and
// the thread writes its items and tiles, the tiles from the last token back, for those have the
// most keys. Bound by latency; made once a step and shared by all layers.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/launch.cuh"
#include "cuda/paged_plan.cuh"
#include "ops.h"

namespace bytetx {
namespace paged {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct PlanKernelParams {
    const int* cu_seqlens;
    const int* kv_seqlens;
    PlanView plan;
    PlanSizes sizes;
    Chunking chunking;
    int batch_size;
    int group;
    int num_kv_heads;
    int window;
    int tile_tokens;
};

// What one sequence needs, or all before it.
struct Need {
    int units, items, partial_rows, tiles;

    __device__ Need operator+(const Need& other) const {
        return {units + other.units, items + other.items, partial_rows + other.partial_rows,
                tiles + other.tiles};
    }
};

__device__ Need shuffle_up(const Need& need, int by) {
    return {__shfl_up_sync(~0u, need.units, by), __shfl_up_sync(~0u, need.items, by),
            __shfl_up_sync(~0u, need.partial_rows, by), __shfl_up_sync(~0u, need.tiles, by)};
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
    return before + Need{sum.units - own.units, sum.items - own.items,
                         sum.partial_rows - own.partial_rows, sum.tiles - own.tiles};
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
        is_tiled = p.tile_tokens > 0 && tokens > 1;
        if (p.window > 0) first_visible = max(0, keys - tokens + 1 - p.window);
        first_key = first_visible / kStepKeys * kStepKeys;
        chunk_keys = p.chunking.length(keys - first_key);
        num_chunks = (keys - first_key + chunk_keys - 1) / chunk_keys;
    }

    __device__ Need need(const PlanKernelParams& p) const {
        if (tokens == 0) return {};
        if (is_tiled) return {0, 0, 0, (tokens + p.tile_tokens - 1) / p.tile_tokens};
        const int rows = tokens * p.group, units = (rows + kUnitRows - 1) / kUnitRows;
        return {units, units * num_chunks, num_chunks > 1 ? rows * num_chunks : 0, 0};
    }
};

__device__ void write_items(const PlanKernelParams& p, const Piece& piece, int sequence, Need at) {
    const int rows = piece.tokens * p.group;
    for (int row = 0; row < rows; row += kUnitRows) {
        for (int chunk = 0; chunk < piece.num_chunks; ++chunk) {
            const int first = piece.first_key + chunk * piece.chunk_keys;
            if (at.items >= p.sizes.items) return;  // only where a length exceeds its bound
            p.plan.items[at.items++] = {sequence,
                                        piece.first_token,
                                        row,
                                        min(rows - row, kUnitRows),
                                        piece.keys - piece.tokens,
                                        piece.first_visible,
                                        first,
                                        min(first + piece.chunk_keys, piece.keys),
                                        chunk,
                                        piece.num_chunks,
                                        at.partial_rows,
                                        at.units};
        }
        at.partial_rows += min(rows - row, kUnitRows) * piece.num_chunks;
        ++at.units;
    }
}

__device__ void write_tiles(const PlanKernelParams& p, const Piece& piece, int sequence, int at) {
    const int past = piece.keys - piece.tokens;
    const int num_tiles = (piece.tokens + p.tile_tokens - 1) / p.tile_tokens;
    for (int i = num_tiles - 1; i >= 0; --i) {
        const int token = i * p.tile_tokens;
        const int end = past + min(token + p.tile_tokens, piece.tokens);
        const int first = p.window > 0 ? max(0, past + token + 1 - p.window) : 0;
        if (at >= p.sizes.tiles) return;
        p.plan.tiles[at++] = {sequence, token, first / kRoundKeys * kRoundKeys, end};
    }
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanKernelParams p) {
    wait_for_prior_kernel();
    release_next_kernel();
    Need total{};
    for (int first = 0; first < p.batch_size; first += kThreads) {
        const int sequence = first + static_cast<int>(threadIdx.x);
        const Piece piece(p, sequence);
        const Need at = exclusive_scan(piece.need(p), total);
        if (piece.tokens == 0) continue;
        if (piece.is_tiled) {
            write_tiles(p, piece, sequence, at.tiles);
        } else {
            write_items(p, piece, sequence, at);
        }
    }
    const int64_t num_counters = min(int64_t{total.units} * p.num_kv_heads, p.sizes.counters);
    for (int64_t i = threadIdx.x; i < num_counters; i += kThreads) p.plan.counters[i] = 0;
    if (threadIdx.x == 0) {
        *p.plan.header = {static_cast<int>(min(int64_t{total.items}, p.sizes.items)),
                          static_cast<int>(min(int64_t{total.tiles}, p.sizes.tiles)),
                          {0, 0}};
    }
}

}  // namespace
}  // namespace paged

int64_t paged_plan_bytes(const PagedPlanParams& p) {
    const paged::PlanSizes sizes = paged::plan_sizes(p);
    return sizeof(paged::PagedHeader) + sizes.items * sizeof(paged::PagedItem) +
           sizes.tiles * sizeof(paged::PagedTile) + sizes.counters * sizeof(unsigned);
}

void paged_plan(const PagedPlanParams& p, const Launch& launch) {
    if (p.batch_size == 0 || p.total_tokens == 0) return;
    if (p.plan_bytes < paged_plan_bytes(p)) {
        throw std::invalid_argument("paged_plan needs " + std::to_string(paged_plan_bytes(p)) +
                                    " bytes, got " + std::to_string(p.plan_bytes));
    }
    const DeviceGuard guard(launch.device);
    const paged::PlanSizes sizes = paged::plan_sizes(p);
    const paged::PlanKernelParams params{p.cu_seqlens,
                                         p.kv_seqlens,
                                         paged::view_plan(p.plan, sizes),
                                         sizes,
                                         paged::chunking(),
                                         static_cast<int>(p.batch_size),
                                         p.num_heads / p.num_kv_heads,
                                         p.num_kv_heads,
                                         p.window,
                                         p.tile_tokens};
    const LaunchShape shape{1, paged::kThreads, 0, static_cast<cudaStream_t>(launch.stream)};
    launch_kernel(paged::plan_kernel, shape, params);
}

}  // namespace bytetx
