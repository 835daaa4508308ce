// Pooling of packed rows: one f32 vector a sequence, normalised where asked, in one launch.
//
//   out[s] = reduce(x[cu_seqlens[s] + first_tokens[s] .. cu_seqlens[s + 1])) / divisor
//
// x [total_tokens, hidden_size] f32, f16, bf16; out f32 [batch_size, hidden_size]. cls, lasttoken:
// the sum of one row; weightedmean weighs a row by its index in the sequence plus one.
//
// Row r of a sequence belongs to slice (a, b), a = r / 8 % 8 and b = r % 8. A slice is summed row
// after row, the slices over a, then over b. Three ways do this, by the sequence's own length, and
// add the same numbers in the same order, so no bit depends on the way or on batch mates:
//
//   to 64 rows    a warp: one accumulator a thread for each b
//   to 512 rows   a CTA: warp b, one accumulator a thread for each a; b through shared memory
//   above         a cluster: CTA b, warp a, one accumulator; a through shared memory, b through
//                 that of the cluster
//
// A tile of columns at a time: a lane reads 16 bytes (an element where rows are not 16-byte
// aligned), 8 or 16 rows at once. A cluster of 8 CTAs owns a group of neighbouring sequences: it
// first spreads the short ones over its warps and CTAs, then takes the long ones together. A sum
// over n rows is n / 64 additions deep, plus 14. `normalize` divides the stored row by its norm.
//
// Bytes: every kept row once, batch_size * hidden_size * 4 written. Bound by HBM, and for a few
// long sequences by what 8 SMs can have in flight; fraction reached: csrc/README.md. Source:
// standard.

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

constexpr int kPoolWarps = 8;  // of a CTA, and CTAs of a cluster: the 8 x 8 slices
constexpr int kPoolThreads = kPoolWarps * kWarpSize;
constexpr int64_t kWarpRows = kPoolWarps * kPoolWarps;  // every slice has one row at most
constexpr int64_t kCtaRows = 512;  // above, 7 more CTAs outweigh their barriers
constexpr int64_t kFilling = 16;  // clusters that give every SM of an H200 its one CTA
constexpr int64_t kGroup = 64;    // sequences of a group at most: one a warp

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

// kElems: elements of one access, kVecSize<T> or 1. Untyped, because 16-bit elements that may be
// loaded or not cost a register each.
template <typename T, int kElems>
struct Access {
    uint4 words;

    __device__ __forceinline__ void load(const T* at) {
        words = *reinterpret_cast<const uint4*>(at);
    }
    __device__ __forceinline__ float get(int j) const {
        return static_cast<float>(reinterpret_cast<const Vec<T>*>(&words)->value[j]);
    }
};

template <typename T>
struct Access<T, 1> {
    T element;

    __device__ __forceinline__ void load(const T* at) { element = *at; }
    __device__ __forceinline__ float get(int) const { return static_cast<float>(element); }
};

template <int kElems>
constexpr int kTileColumns = kWarpSize * kElems;

// A lane's f32 columns, 16 bytes at a time where it has four or more.
template <int kElems>
__device__ __forceinline__ void store_floats(float* at, const float (&values)[kElems]) {
    if constexpr (kElems == 1) *at = values[0];
#pragma unroll
    for (int j = 0; j + 4 <= kElems; j += 4) {
        *reinterpret_cast<float4*>(at + j) =
            make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
    }
}

template <int kElems>
__device__ __forceinline__ void load_floats(const float* at, float (&values)[kElems]) {
    if constexpr (kElems == 1) values[0] = *at;
#pragma unroll
    for (int j = 0; j + 4 <= kElems; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(at + j);
        values[j] = four.x;
        values[j + 1] = four.y;
        values[j + 2] = four.z;
        values[j + 3] = four.w;
    }
}

template <int kElems>
struct alignas(kVecBytes) Partials {
    float warps[kPoolWarps][kTileColumns<kElems>];
    float cta[2][kTileColumns<kElems>];  // twice: written while other CTAs read the tile before
};

// This thread's columns of rows first, first + gap, ...: row i goes to accumulator i % kOwn, and
// the accumulators are joined in order.
template <typename T, int kElems, bool kIsMax, int kOwn>
__device__ __forceinline__ void reduce_rows(const PoolParams& p, const RowRange& rows,
                                            int64_t column, int first, int gap,
                                            float (&joined)[kElems]) {
    constexpr int kLoads = kOwn == 1 ? 16 : 8;  // 16: a long sequence has but 8 SMs
    const bool is_weighted = p.mode == PoolMode::weightedmean;
    const T* x = static_cast<const T*>(p.x) + (rows.first + first) * p.hidden_size + column;
    const int64_t stride = gap * p.hidden_size;
    float sums[kOwn][kElems];
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
#pragma unroll
        for (int j = 0; j < kElems; ++j) sums[u][j] = kNeutral<kIsMax>;
    }
    for (int64_t base = first; base < rows.count; base += gap * kLoads, x += kLoads * stride) {
        const int left = static_cast<int>(rows.count - base);  // cu_seqlens is int32
        Access<T, kElems> loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (i * gap < left) loaded[i].load(x + i * stride);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (i * gap >= left) break;
            const auto weight = static_cast<float>(rows.index + base + i * gap + 1);
#pragma unroll
            for (int j = 0; j < kElems; ++j) {
                float v = loaded[i].get(j);
                if (is_weighted) v = __fmul_rn(v, weight);  // not fused: the ways would differ
                sums[i % kOwn][j] = join<kIsMax>(sums[i % kOwn][j], v);
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

// One over the norm of a stored row, which a warp finds in the same way wherever it is needed.
template <int kElems>
__device__ __forceinline__ float inverse_norm(const PoolParams& p, const float* out) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float squares = 0.0f;
    for (int64_t c = lane * kElems; c < p.hidden_size; c += kTileColumns<kElems>) {
        float values[kElems];
        load_floats<kElems>(out + c, values);
#pragma unroll
        for (int j = 0; j < kElems; ++j) squares = fmaf(values[j], values[j], squares);
    }
    return 1.0f / max_or_nan(sqrtf(row_sum<kWarpSize>(squares)), 1e-12f);
}

template <typename T, int kElems, bool kIsMax>
__device__ __forceinline__ void pool_by_warp(const PoolParams& p, const RowRange& rows,
                                             float* out) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float scale = 1.0f / divisor_of(p.mode, rows);
    for (int64_t c = lane * kElems; c < p.hidden_size; c += kTileColumns<kElems>) {
        float joined[kElems] = {};
        if (rows.count > 0) reduce_rows<T, kElems, kIsMax, kPoolWarps>(p, rows, c, 0, 1, joined);
#pragma unroll
        for (int j = 0; j < kElems; ++j) joined[j] = rows.count > 0 ? joined[j] * scale : 0.0f;
        store_floats<kElems>(out + c, joined);
    }
    if (!p.normalize) return;
    const float inverse = inverse_norm<kElems>(p, out);  // a lane reads what it wrote
    for (int64_t c = lane * kElems; c < p.hidden_size; c += kTileColumns<kElems>) {
        float values[kElems];
        load_floats<kElems>(out + c, values);
#pragma unroll
        for (int j = 0; j < kElems; ++j) values[j] *= inverse;
        store_floats<kElems>(out + c, values);
    }
}

// Column `column` of the tile whose partial rows the CTA's warps have written.
template <int kElems, bool kIsMax>
__device__ __forceinline__ float join_warps(const Partials<kElems>& partials, int column) {
    float total = partials.warps[0][column];
#pragma unroll
    for (int warp = 1; warp < kPoolWarps; ++warp) {
        total = join<kIsMax>(total, partials.warps[warp][column]);
    }
    return total;
}

template <typename T, int kElems, bool kIsMax, bool kIsCluster>
__device__ __forceinline__ void pool_by_ctas(const PoolParams& p, const RowRange& rows, int rank,
                                             Partials<kElems>& partials, float* out) {
    constexpr int kColumns = kTileColumns<kElems>;
    constexpr int kOwnColumns = kIsCluster ? kColumns / kPoolWarps : kColumns;  // to store
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize;
    const int in_tile = thread % kWarpSize * kElems;
    const int mine = rank * kOwnColumns + thread;
    const float scale = 1.0f / divisor_of(p.mode, rows);
    const auto sync = [] {
        if constexpr (kIsCluster) cg::this_cluster().sync();
        if constexpr (!kIsCluster) __syncthreads();
    };
    int buffer = 0;
    for (int64_t tile = 0; tile < p.hidden_size; tile += kColumns, buffer ^= 1) {
        if (tile + in_tile < p.hidden_size) {
            float joined[kElems];
            reduce_rows<T, kElems, kIsMax, kIsCluster ? 1 : kPoolWarps>(
                p, rows, tile + in_tile, kIsCluster ? warp * kPoolWarps + rank : warp,
                kIsCluster ? kPoolWarps * kPoolWarps : kPoolWarps, joined);
            store_floats<kElems>(&partials.warps[warp][in_tile], joined);
        }
        __syncthreads();  // the partial rows of all warps are written
        if constexpr (kIsCluster) {
            if (thread < kColumns) {
                partials.cta[buffer][thread] = join_warps<kElems, kIsMax>(partials, thread);
            }
            sync();  // those of all CTAs are, and those of the tile before have been read
        }
        if (thread < kOwnColumns && tile + mine < p.hidden_size) {
            float total;
            if constexpr (kIsCluster) {
                float* own = &partials.cta[buffer][mine];
                total = *cg::this_cluster().map_shared_rank(own, 0);
#pragma unroll
                for (int cta = 1; cta < kPoolWarps; ++cta) {
                    total = join<kIsMax>(total, *cg::this_cluster().map_shared_rank(own, cta));
                }
            } else {
                total = join_warps<kElems, kIsMax>(partials, mine);
            }
            out[tile + mine] = total * scale;
        }
        if constexpr (!kIsCluster) sync();  // the partial rows have been read
    }
    sync();  // the row is stored, and no CTA reads another's shared memory any more
    if (!p.normalize) return;
    const float inverse = inverse_norm<kElems>(p, out);
    sync();  // every warp has read the row, which may now change
    constexpr int kStep = kIsCluster ? kPoolWarps * kPoolThreads : kPoolThreads;
    for (int64_t i = rank * kPoolThreads + thread; i < p.hidden_size; i += kStep) out[i] *= inverse;
}

// group_size: sequences of a cluster.
template <typename T, int kElems, bool kIsMax>
__global__ void __launch_bounds__(kPoolThreads) __cluster_dims__(kPoolWarps, 1, 1)
    pool_kernel(const __grid_constant__ PoolParams p, const int64_t group_size) {
    __shared__ Partials<kElems> partials;
    const int rank = static_cast<int>(blockIdx.x % kPoolWarps);
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int64_t begin = blockIdx.x / kPoolWarps * group_size;
    const int64_t end = min(begin + group_size, p.batch_size);
    const int64_t own = begin + warp * kPoolWarps + rank;
    if (own < end) {
        const RowRange rows = kept_rows(p, own);
        float* out = p.out + own * p.hidden_size;
        if (rows.count <= kWarpRows) pool_by_warp<T, kElems, kIsMax>(p, rows, out);
    }
    for (int64_t sequence = begin + rank; sequence < end; sequence += kPoolWarps) {
        const RowRange rows = kept_rows(p, sequence);
        if (rows.count <= kWarpRows || rows.count > kCtaRows) continue;
        float* out = p.out + sequence * p.hidden_size;
        pool_by_ctas<T, kElems, kIsMax, false>(p, rows, 0, partials, out);
    }
    for (int64_t sequence = begin; sequence < end; ++sequence) {
        const RowRange rows = kept_rows(p, sequence);
        if (rows.count <= kCtaRows) continue;
        float* out = p.out + sequence * p.hidden_size;
        pool_by_ctas<T, kElems, kIsMax, true>(p, rows, rank, partials, out);
    }
}

template <typename T, int kElems, bool kIsMax>
void launch_pool(const PoolParams& p, cudaStream_t stream) {
    const int64_t spread = (p.batch_size + kFilling - 1) / kFilling;
    const int64_t group_size = spread < kGroup ? spread : kGroup;
    const int64_t num_groups = (p.batch_size + group_size - 1) / group_size;
    pool_kernel<T, kElems, kIsMax>
        <<<static_cast<unsigned>(num_groups * kPoolWarps), kPoolThreads, 0, stream>>>(p,
                                                                                      group_size);
}

void check(const PoolParams& p) {
    if (p.batch_size < 0 || p.batch_size > INT32_MAX || p.hidden_size <= 0) {
        throw std::invalid_argument(
            "pool needs 0 <= batch_size < 2^31, hidden_size > 0; got " +
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
            if (p.mode == PoolMode::max) return launch_pool<T, kElems, true>(p, stream);
            launch_pool<T, kElems, false>(p, stream);
        };
        if (fits_vecs<T>(p.hidden_size, p.x, p.out)) {
            return with_elems.template operator()<kVecSize<T>>();
        }
        with_elems.template operator()<1>();
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
