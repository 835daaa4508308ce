// Pooling of packed rows: one f32 vector a sequence, normalised where asked, in one launch.
//
//   out[s] = reduce(x[cu_seqlens[s] + first_tokens[s] .. cu_seqlens[s + 1])) / divisor
//
// x [total_tokens, hidden_size] f32, f16, bf16; out f32 [batch_size, hidden_size]. cls, lasttoken:
// the sum of one row; weightedmean weighs a row by its index in the sequence plus one.
//
// A CTA of 8 warps takes a tile of columns: a warp reads 512 consecutive bytes of a row, or 32
// elements where rows are not 16-byte aligned, 8 rows at a time. Rows go to 64 slices by their
// index modulo 64; slice u * 8 + w is warp w's u-th accumulator. The slices are added in one fixed order: the
// CTA's shared memory holds one partial row a warp.
//
//   short sequences, many of them   one CTA a sequence, 8 accumulators a thread
//   long sequences, few of them     a cluster of 8 CTAs a sequence, 1 accumulator a thread: CTA u
//                                   holds the slices u * 8 ..; partial rows are read through DSMEM
//
// Both add the same numbers in the same order, so the choice (from batch_size and total_tokens)
// changes no bit, and a vector depends on nothing but its own rows. A sum over n rows is n / 64
// additions deep, plus 14.
//
// With `normalize` a CTA, or a cluster, goes over all tiles of its sequence and then divides its
// share of the row by the norm of what was stored; without, tiles are CTAs of their own.
//
// Bytes: every kept row once, batch_size * hidden_size * 4 written. Bound by HBM; fraction reached:
// csrc/README.md. Source: standard.

#include <cooperative_groups.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx {
namespace {

namespace cg = cooperative_groups;

constexpr int kPoolWarps = 8;
constexpr int kPoolThreads = kPoolWarps * kWarpSize;
constexpr int kRanks = 8;  // CTAs of a cluster, and accumulators where there is none
constexpr int kSlices = kPoolWarps * kRanks;
constexpr int kLoads = 8;              // in flight a thread: 32 KiB a CTA
constexpr int64_t kFilling = 4 * 132;  // sequences that fill an H200 with one CTA each

struct RowRange {
    int64_t first;  // row of x
    int64_t count;
    int64_t index;  // of the first row in its sequence
};

// A sequence's rows; whatever cu_seqlens and first_tokens hold, they are rows of x.
__device__ __forceinline__ RowRange kept_rows(const PoolParams& p, int64_t sequence) {
    const int64_t start = max(p.cu_seqlens[sequence], 0);
    const int64_t end = min(static_cast<int64_t>(p.cu_seqlens[sequence + 1]), p.total_tokens);
    const int64_t skip = p.first_tokens != nullptr ? max(p.first_tokens[sequence], 0) : 0;
    RowRange rows{start + skip, max(end - start - skip, int64_t{0}), skip};
    if (p.mode == PoolMode::lasttoken && rows.count > 0) rows.first = end - 1;
    const bool is_one = p.mode == PoolMode::cls || p.mode == PoolMode::lasttoken;
    if (is_one) rows.count = min(rows.count, int64_t{1});
    return rows;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    return a > b || a != a ? a : b;  // b where b is NaN
}

template <bool kIsMax>
__device__ __forceinline__ float join(float a, float b) {
    return kIsMax ? max_or_nan(a, b) : a + b;
}

template <bool kIsMax>
constexpr float kNeutral = kIsMax ? -__builtin_inff() : 0.0f;

__device__ __forceinline__ float divisor_of(PoolMode mode, const RowRange& rows) {
    const float count = static_cast<float>(rows.count);
    if (mode == PoolMode::mean) return count;
    if (mode == PoolMode::mean_sqrt_len_tokens) return sqrtf(count);
    if (mode != PoolMode::weightedmean) return 1.0f;
    return static_cast<float>(rows.count * (2 * rows.index + rows.count + 1) / 2);
}

// kElems: elements of one access, kVecSize<T> or 1.
template <typename T, int kElems>
struct Access {
    T value[kElems];

    __device__ __forceinline__ void load(const T* at) {
        if constexpr (kElems == 1) {
            value[0] = *at;
        } else {
            *reinterpret_cast<Vec<T>*>(value) = load_vec<T>(at, 0);
        }
    }
};

template <int kElems>
constexpr int kTileColumns = kWarpSize * kElems;

// One partial row a warp, twice: a tile is written while slower CTAs still read the one before.
template <int kElems>
using Partials = float[2][kPoolWarps][kTileColumns<kElems>];

// This thread's columns of the slices that CTA `rank` of kCtas holds, joined in order of slices.
template <typename T, int kElems, bool kIsMax, int kCtas>
__device__ __forceinline__ void reduce_rows(const PoolParams& p, const RowRange& rows, int rank,
                                            const T* x, float (&joined)[kElems]) {
    constexpr int kOwn = kRanks / kCtas;  // accumulators
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const bool is_weighted = p.mode == PoolMode::weightedmean;
    float sums[kOwn][kElems];
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
#pragma unroll
        for (int j = 0; j < kElems; ++j) sums[u][j] = kNeutral<kIsMax>;
    }
    constexpr int kStep = kSlices * kLoads / kOwn;  // rows that the CTAs have in flight
    for (int64_t base = rank * kOwn * kPoolWarps + warp; base < rows.count; base += kStep) {
        Access<T, kElems> loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int64_t row = base + i / kOwn * kSlices + i % kOwn * kPoolWarps;
            if (row < rows.count) loaded[i].load(x + row * p.hidden_size);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int64_t row = base + i / kOwn * kSlices + i % kOwn * kPoolWarps;
            if (row >= rows.count) continue;
            const float weight = is_weighted ? static_cast<float>(rows.index + row + 1) : 1.0f;
#pragma unroll
            for (int j = 0; j < kElems; ++j) {
                const float v = static_cast<float>(loaded[i].value[j]);
                float& sum = sums[i % kOwn][j];
                sum = kIsMax ? max_or_nan(sum, v) : fmaf(v, weight, sum);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
        joined[j] = sums[0][j];
#pragma unroll
        for (int u = 1; u < kOwn; ++u) joined[j] = join<kIsMax>(joined[j], sums[u][j]);
    }
}

// All CTAs of the sequence have written what they wrote before: to shared memory and to out.
template <int kCtas>
__device__ __forceinline__ void sync_ctas() {
    if constexpr (kCtas == 1) {
        __syncthreads();
    } else {
        cg::this_cluster().sync();
    }
}

// Column `column` of the tile: partial rows of all warps and CTAs, joined in order.
template <int kElems, bool kIsMax, int kCtas>
__device__ __forceinline__ float join_partials(float (&partial)[kPoolWarps][kTileColumns<kElems>],
                                               int column) {
    float total = kNeutral<kIsMax>;
#pragma unroll
    for (int warp = 0; warp < kPoolWarps; ++warp) {
        float sum = kNeutral<kIsMax>;
        if constexpr (kCtas == 1) {
            sum = partial[warp][column];
        } else {
            auto* own = &partial[warp][column];
            sum = *cg::this_cluster().map_shared_rank(own, 0);
#pragma unroll
            for (int rank = 1; rank < kCtas; ++rank) {
                sum = join<kIsMax>(sum, *cg::this_cluster().map_shared_rank(own, rank));
            }
        }
        total = join<kIsMax>(total, sum);
    }
    return total;
}

// Divides this CTA's share of a stored row by the norm of all, which every CTA computes alike.
template <int kCtas>
__device__ __forceinline__ void normalize_stored(const PoolParams& p, int rank, float* out) {
    sync_ctas<kCtas>();  // the row is stored
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < p.hidden_size; i += kPoolThreads) squares += out[i] * out[i];
    const float norm = max_or_nan(sqrtf(row_sum<kPoolThreads>(squares)), 1e-12f);
    sync_ctas<kCtas>();  // the row has been read by all, and may change
    for (int64_t i = rank * kPoolThreads + threadIdx.x; i < p.hidden_size;
         i += kCtas * kPoolThreads) {
        out[i] /= norm;
    }
}

// One sequence by CTA `rank` of kCtas, over the tiles that blockIdx.y says.
template <typename T, int kElems, bool kIsMax, int kCtas>
__device__ __forceinline__ void pool_sequence(const PoolParams& p, int64_t sequence, int rank,
                                              const RowRange& rows, Partials<kElems>& partials) {
    constexpr int kColumns = kTileColumns<kElems>;
    constexpr int kOwnColumns = kColumns / kCtas;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int in_tile = static_cast<int>(threadIdx.x) % kWarpSize * kElems;
    const int64_t num_tiles = (p.hidden_size + kColumns - 1) / kColumns;
    const float divisor = divisor_of(p.mode, rows);
    float* out = p.out + sequence * p.hidden_size;
    int buffer = 0;
    for (int64_t tile = blockIdx.y; tile < num_tiles; tile += gridDim.y, buffer ^= 1) {
        const int64_t column = tile * kColumns + in_tile;
        if (column < p.hidden_size) {
            const T* x = static_cast<const T*>(p.x) + rows.first * p.hidden_size + column;
            float joined[kElems];
            reduce_rows<T, kElems, kIsMax, kCtas>(p, rows, rank, x, joined);
#pragma unroll
            for (int j = 0; j < kElems; ++j) partials[buffer][warp][in_tile + j] = joined[j];
        }
        sync_ctas<kCtas>();  // partial rows are written; those of the tile before have been read
        const int mine = rank * kOwnColumns + static_cast<int>(threadIdx.x);
        if (static_cast<int>(threadIdx.x) < kOwnColumns && tile * kColumns + mine < p.hidden_size) {
            const float total = join_partials<kElems, kIsMax, kCtas>(partials[buffer], mine);
            out[tile * kColumns + mine] = total / divisor;
        }
    }
    if (p.normalize) normalize_stored<kCtas>(p, rank, out);
    if constexpr (kCtas > 1) sync_ctas<kCtas>();  // no CTA leaves while its partial rows are read
}

template <typename T, int kElems, bool kIsMax, int kCtas>
__global__ void __launch_bounds__(kPoolThreads)
    pool_kernel(const __grid_constant__ PoolParams p) {
    __shared__ Partials<kElems> partials;
    const int64_t sequence = blockIdx.x / kCtas;
    const int rank = static_cast<int>(blockIdx.x % kCtas);
    const RowRange rows = kept_rows(p, sequence);
    if (rows.count > kSlices && kCtas > 1) {
        return pool_sequence<T, kElems, kIsMax, kCtas>(p, sequence, rank, rows, partials);
    }
    if (rank != 0) return;  // few rows: the cluster costs more than it brings
    if (rows.count > 0) {
        return pool_sequence<T, kElems, kIsMax, 1>(p, sequence, 0, rows, partials);
    }
    for (int64_t i = blockIdx.y * kPoolThreads + threadIdx.x; i < p.hidden_size;
         i += gridDim.y * kPoolThreads) {
        p.out[sequence * p.hidden_size + i] = 0.0f;
    }
}

template <typename T, int kElems, bool kIsMax, int kCtas>
void launch_pool(const PoolParams& p, cudaStream_t stream) {
    const int64_t num_tiles = (p.hidden_size + kTileColumns<kElems> - 1) / kTileColumns<kElems>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCtas, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(p.batch_size * kCtas),
                          p.normalize ? 1u : static_cast<unsigned>(num_tiles));
    config.blockDim = dim3(kPoolThreads);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    BYTETX_CUDA_CHECK(cudaLaunchKernelEx(&config, pool_kernel<T, kElems, kIsMax, kCtas>, p));
}

template <typename T, int kElems, bool kIsMax>
void choose_ctas(const PoolParams& p, cudaStream_t stream) {
    const bool has_long = p.total_tokens > kSlices * p.batch_size;
    if (p.batch_size < kFilling && has_long) {
        return launch_pool<T, kElems, kIsMax, kRanks>(p, stream);
    }
    launch_pool<T, kElems, kIsMax, 1>(p, stream);
}

void check(const PoolParams& p) {
    constexpr int64_t kMaxSequences = INT32_MAX / kRanks;
    constexpr int64_t kMaxHidden = 65535 * int64_t{kWarpSize};  // tiles are the grid's second axis
    if (p.batch_size < 0 || p.batch_size > kMaxSequences || p.hidden_size <= 0 ||
        p.hidden_size > kMaxHidden) {
        throw std::invalid_argument(
            "pool needs 0 <= batch_size <= " + std::to_string(kMaxSequences) +
            ", 0 < hidden_size <= " + std::to_string(kMaxHidden) + "; got " +
            std::to_string(p.batch_size) + " and " + std::to_string(p.hidden_size));
    }
}

}  // namespace

void pool(const PoolParams& p, const Launch& launch) {
    check(p);
    if (p.batch_size == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        const auto with_elems = [&]<int kElems>() {
            if (p.mode == PoolMode::max) return choose_ctas<T, kElems, true>(p, stream);
            choose_ctas<T, kElems, false>(p, stream);
        };
        if (fits_vecs<T>(p.hidden_size, p.x)) {
            return with_elems.template operator()<kVecSize<T>>();
        }
        with_elems.template operator()<1>();
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
