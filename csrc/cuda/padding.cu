// A padded batch to packed rows and back, for callers that hold rectangles (Hugging Face models).
//
//   pack:    packed[place(r, c)] = ids[r, c] where mask[r, c] != 0; rows[r, c] = place(r, c) or -1
//   unpack:  out[i] = x[rows[i]], zeros where rows[i] is -1
//
// place(r, c) counts the tokens before (r, c) in row-major order. Ids int32 or int64 [num_rows,
// num_columns], mask of any integer or floating dtype; everything packed is int32. Behind the
// batch's tokens come fillers (bytetx/buckets.py), so that a CUDA graph of fixed sizes
// serves any lengths.
//
// pack_padded_kernel: a CTA a row. It first counts the tokens before its row, from the rows'
// lengths where they are known and from the mask where not (small batches: what all CTAs read then
// is at most num_rows times the mask, in L2), then takes 256 columns at a time: a ballot and the
// counts of eight warps give each token its place. One more CTA writes what is behind the batch.
// count_tokens_kernel: a CTA a row. unpack_padded_kernel: a thread 16 bytes of the rectangle.
//
// Bytes: packing reads every id and mask once and writes about as much: a launch's time for some
// thousand places. Unpacking reads the tokens' rows and writes the rectangle; bound by HBM. Not
// measured yet. Source: standard.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "padding_ops.h"

namespace bytetx {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ bool is_non_zero(const PaddedMatrix& m, int64_t at) {
    const int sign = m.is_float ? 1 : 0;  // shifted out
    switch (m.item_bytes) {
        case 1:
            return static_cast<const uint8_t*>(m.data)[at] != 0;
        case 2:
            return static_cast<uint16_t>(static_cast<const uint16_t*>(m.data)[at] << sign) != 0;
        case 4:
            return (static_cast<const uint32_t*>(m.data)[at] << sign) != 0;
        default:
            return (static_cast<const uint64_t*>(m.data)[at] << sign) != 0;
    }
}

// An id too large for int32 stays too large for every table, instead of wrapping round.
__device__ __forceinline__ int32_t id_at(const PaddedMatrix& m, int64_t at) {
    if (m.item_bytes == 4) return static_cast<const int32_t*>(m.data)[at];
    const int64_t id = static_cast<const int64_t*>(m.data)[at];
    return static_cast<int32_t>(min(max(id, int64_t{INT32_MIN}), int64_t{INT32_MAX}));
}

struct Count {
    int before;  // flags of the threads before this one
    int total;   // flags of the whole CTA
};

// Adds up a small number of each thread. All threads of a CTA; counts: [kWarps] in shared memory.
__device__ __forceinline__ int sum_threads(int own, int* counts) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    own = __reduce_add_sync(kAllLanes, own);
    if (threadIdx.x % kWarpSize == 0) counts[warp] = own;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += counts[w];
    __syncthreads();  // all have read the counts that the next call overwrites
    return total;
}

// Counts flags. All threads of a CTA; counts: [kWarps] in shared memory.
__device__ __forceinline__ Count count_flags(bool flag, int* counts) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t flags = __ballot_sync(kAllLanes, flag);
    if (lane == 0) counts[warp] = __popc(flags);
    __syncthreads();
    Count found{__popc(flags & ((1u << lane) - 1)), 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        if (w < warp) found.before += counts[w];
        found.total += counts[w];
    }
    __syncthreads();  // all have read the counts that the next call overwrites
    return found;
}

__global__ void __launch_bounds__(kThreads) count_tokens_kernel(const CountTokensParams p) {
    __shared__ int counts[kWarps];
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t row = blockIdx.x, first = row * p.mask.row_stride;
    int num_tokens = 0, num_runs = 0;
    for (int64_t column = threadIdx.x; column < p.num_columns; column += kThreads) {
        if (!is_non_zero(p.mask, first + column)) continue;
        ++num_tokens;
        if (column == 0 || !is_non_zero(p.mask, first + column - 1)) ++num_runs;
    }
    num_tokens = sum_threads(num_tokens, counts);
    num_runs = sum_threads(num_runs, counts);
    if (threadIdx.x != 0) return;
    p.counts[row] = num_tokens;
    p.counts[p.num_rows + row] = num_runs;
    p.counts[2 * p.num_rows + row] = is_non_zero(p.mask, first) ? 1 : 0;
}

// The tokens before a row. All threads of a CTA.
__device__ __forceinline__ int64_t tokens_before(const PackPaddedParams& p, int64_t row,
                                                 int* counts) {
    if (p.mask.data == nullptr) return row * p.num_columns;
    int own = 0;
    if (p.seqlens != nullptr) {
        for (int64_t i = threadIdx.x; i < row; i += kThreads) own += p.seqlens[i];
    } else {
        for (int64_t i = threadIdx.x; i < row * p.num_columns; i += kThreads) {
            const int64_t at = i / p.num_columns * p.mask.row_stride + i % p.num_columns;
            own += is_non_zero(p.mask, at) ? 1 : 0;
        }
    }
    return sum_threads(own, counts);
}

// Empty sequences up to num_texts, fillers, and the fillers' ids. total: tokens of the batch.
__device__ __forceinline__ void write_fillers(const PackPaddedParams& p, int64_t total) {
    for (int64_t i = p.num_rows + threadIdx.x; i <= p.num_sequences; i += kThreads) {
        const int64_t end = total + p.filler_tokens * max(i - p.num_texts, int64_t{0});
        p.cu_seqlens[i] = static_cast<int32_t>(min(end, p.num_tokens));
    }
    for (int64_t i = total + threadIdx.x; i < p.num_tokens; i += kThreads) {
        p.packed_ids[i] = 0;
        p.packed_positions[i] = 0;
        if (p.packed_types != nullptr) p.packed_types[i] = 0;
    }
}

// Any bad id of a table: the caller names one.
__device__ __forceinline__ void note_bad(int32_t id, int32_t table_rows, int32_t* bad_id) {
    if (table_rows > 0 && (id < 0 || id >= table_rows)) *bad_id = id;
}

__global__ void __launch_bounds__(kThreads)
    pack_padded_kernel(const __grid_constant__ PackPaddedParams p) {
    __shared__ int counts[kWarps];
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t row = blockIdx.x;
    int64_t place = tokens_before(p, row, counts);
    if (row == p.num_rows) return write_fillers(p, place);
    if (threadIdx.x == 0) p.cu_seqlens[row] = static_cast<int32_t>(place);
    const bool counts_positions = p.position_ids.data == nullptr && p.position_offset != 0;
    const int32_t pad = p.position_offset - 1;
    int num_counted = 0;
    for (int64_t first = 0; first < p.num_columns; first += kThreads) {
        const int64_t column = first + threadIdx.x;
        const bool is_inside = column < p.num_columns;
        bool is_token = is_inside;
        if (is_inside && p.mask.data != nullptr) {
            is_token = is_non_zero(p.mask, row * p.mask.row_stride + column);
        }
        const Count tokens = count_flags(is_token, counts);
        const int64_t target = place + tokens.before;
        place += tokens.total;
        if (is_inside && p.rows != nullptr) {
            p.rows[row * p.num_columns + column] = is_token ? static_cast<int32_t>(target) : -1;
        }
        int32_t id = 0;
        if (is_inside) id = id_at(p.input_ids, row * p.input_ids.row_stride + column);
        int32_t position = static_cast<int32_t>(column);
        if (counts_positions) {
            const bool is_counted = is_inside && id != pad;
            const Count found = count_flags(is_counted, counts);
            position = is_counted ? num_counted + found.before + 1 + pad : pad;
            num_counted += found.total;
        }
        if (!is_token || target >= p.num_tokens) continue;
        if (p.position_ids.data != nullptr) {
            position = id_at(p.position_ids, row * p.position_ids.row_stride + column);
        }
        int32_t type = 0;
        if (p.token_type_ids.data != nullptr) {
            type = id_at(p.token_type_ids, row * p.token_type_ids.row_stride + column);
        }
        p.packed_ids[target] = id;
        p.packed_positions[target] = position;
        if (p.packed_types != nullptr) p.packed_types[target] = type;
        if (p.bad_ids == nullptr) continue;
        note_bad(id, p.num_words, p.bad_ids);
        note_bad(position, p.num_positions, p.bad_ids + 1);
        note_bad(type, p.num_types, p.bad_ids + 2);
    }
}

template <typename Vec>
__global__ void __launch_bounds__(kThreads) unpack_padded_kernel(const UnpackPaddedParams p) {
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t vecs_of_row = p.row_bytes / static_cast<int64_t>(sizeof(Vec));
    const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (at >= p.num_places * vecs_of_row) return;
    const int64_t row = p.rows[at / vecs_of_row];
    Vec value{};
    if (row >= 0) value = static_cast<const Vec*>(p.x)[row * vecs_of_row + at % vecs_of_row];
    static_cast<Vec*>(p.out)[at] = value;
}

template <typename Vec>
void launch_unpack(const UnpackPaddedParams& p, cudaStream_t stream) {
    const int64_t vecs = p.num_places * (p.row_bytes / static_cast<int64_t>(sizeof(Vec)));
    const auto ctas = static_cast<unsigned>((vecs + kThreads - 1) / kThreads);
    launch_kernel(unpack_padded_kernel<Vec>, LaunchShape{dim3(ctas), dim3(kThreads), 0, stream}, p);
}

bool is_aligned(const UnpackPaddedParams& p, uintptr_t bytes) {
    const auto bits = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.out) |
                      static_cast<uintptr_t>(p.row_bytes);
    return bits % bytes == 0;
}

void check_items(const char* name, const PaddedMatrix& m, int32_t least) {
    const int32_t bytes = m.item_bytes;
    if (m.data == nullptr ||
        (bytes >= least && (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8)))
        return;
    throw std::invalid_argument(std::string(name) + " has items of " + std::to_string(bytes) +
                                " bytes, needs 1, 2, 4 or 8 (ids 4 or 8)");
}

}  // namespace

void count_tokens(const CountTokensParams& p, const Launch& launch) {
    check_items("mask", p.mask, 1);
    if (p.num_rows == 0 || p.num_columns == 0) {
        throw std::invalid_argument("count_tokens needs rows and columns");
    }
    const DeviceGuard guard(launch.device);
    const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows)), dim3(kThreads), 0,
                            static_cast<cudaStream_t>(launch.stream)};
    launch_kernel(count_tokens_kernel, shape, p);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

void pack_padded(const PackPaddedParams& p, const Launch& launch) {
    check_items("mask", p.mask, 1);
    check_items("input_ids", p.input_ids, 4);
    check_items("token_type_ids", p.token_type_ids, 4);
    check_items("position_ids", p.position_ids, 4);
    if (p.num_rows > p.num_texts || p.num_texts > p.num_sequences || p.num_tokens > INT32_MAX) {
        throw std::invalid_argument("pack_padded needs num_rows <= num_texts <= num_sequences");
    }
    const DeviceGuard guard(launch.device);
    const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows + 1)), dim3(kThreads), 0,
                            static_cast<cudaStream_t>(launch.stream)};
    launch_kernel(pack_padded_kernel, shape, p);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

void unpack_padded(const UnpackPaddedParams& p, const Launch& launch) {
    if (p.num_places == 0 || p.row_bytes == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (is_aligned(p, 16)) {
        launch_unpack<uint4>(p, stream);
    } else if (is_aligned(p, 4)) {
        launch_unpack<uint32_t>(p, stream);
    } else if (is_aligned(p, 2)) {
        launch_unpack<uint16_t>(p, stream);
    } else {
        throw std::invalid_argument("unpack_padded needs rows at even addresses");
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
