// Pooling of packed rows: one f32 vector a sequence, normalised where asked.
//
//   out[s] = reduce(x[cu_seqlens[s] + first_tokens[s] .. cu_seqlens[s + 1])) / divisor
//
// x [total_tokens, hidden_size] f32, f16, bf16; out f32 [batch_size, hidden_size]. cls, lasttoken:
// the sum of one row; weightedmean weighs a row by its index in the sequence plus one.
//
// A sequence's own length decides who sums it, and in which order, so that no bit depends on batch
// mates:
//
//   to 32 rows    a warp, row after row
//   to 256 rows   a CTA: warp w of 8 sums rows w, w + 8, ..., then the warps are joined in order
//   above         blocks of at most 128 rows, as even as can be, each summed so by a CTA into the
//                 workspace; pool_blocks_kernel then joins a sequence's blocks in order
//
// pool_kernel: a CTA first takes up to 8 neighbouring sequences, one a warp, then those of them
// that need a CTA; the last CTAs of the grid share the blocks of all long sequences, which each
// finds by counting blocks over all lengths. A lane holds 16 bytes (an element where rows are not
// 16-byte aligned) of up to four tiles of columns; rows come through a ring in shared memory, 12 KB
// a warp on their way. The last columns are normalised before they are stored; where a row is wider
// than a warp's tiles, the columns before them are divided in place. The second kernel and the
// CTAs for long sequences exist only where max_seqlen allows any.
//
// Bytes: every kept row once, batch_size * hidden_size * 4 written. Bound by HBM; fraction reached:
// docs/kernels/norm-embedding-pooling.md. Source: standard.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "cuda/pooling_blocks.cuh"
#include "cuda/pooling_rows.cuh"
#include "ops.h"

namespace bytetx {
namespace {

template <typename C>
struct Shared {
    Ring<C> warps[kPoolWarps];
    int found_sequence;
    int found_block;
};

// Stores a row whose sums come span by span: total(span) is this thread's quad of one. All threads
// of a CTA.
template <typename C, typename Total>
__device__ __forceinline__ void store_row(const PoolParams& p, const RowRange& rows, float* out,
                                          const Total& total) {
    using Q = Quad<C::kQuad>;
    const int mine = static_cast<int>(threadIdx.x) * C::kQuad;
    const float scale = scale_of(p.mode, rows);
    float squares = 0.0f;
    for (int64_t span = 0; span < p.hidden_size; span += C::kSpan) {
        Q quad = total(span);
        const bool is_column = mine < C::kSpan && span + mine < p.hidden_size;
#pragma unroll
        for (int j = 0; j < C::kQuad; ++j) {
            quad.value[j] *= scale;
            if (is_column) squares = fmaf(quad.value[j], quad.value[j], squares);
        }
        const bool is_last = span + C::kSpan >= p.hidden_size;
        const bool is_normalized = is_last && p.normalize;
        const float factor = is_normalized ? inverse_norm(row_sum<kPoolThreads>(squares)) : 1.0f;
        const auto store = [&](int64_t at, Q values) {
#pragma unroll
            for (int j = 0; j < C::kQuad; ++j) values.value[j] *= factor;
            *reinterpret_cast<Q*>(out + at) = values;
        };
        if (is_column) store(span + mine, quad);
        if (!is_normalized || mine >= C::kSpan) continue;
        for (int64_t before = mine; before < span; before += C::kSpan) {
            store(before, *reinterpret_cast<const Q*>(out + before));
        }
    }
}

// This thread's quad of the sums of a CTA's rows, in the span that starts at column `span`.
template <typename T, typename C, bool kIsMax>
__device__ __forceinline__ Quad<C::kQuad> sum_by_cta(const PoolParams& p, const RowRange& rows,
                                                     int64_t span, Shared<C>& shared) {
    using Q = Quad<C::kQuad>;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int mine = static_cast<int>(threadIdx.x) * C::kQuad;
    Sums<C> sums;
    __syncthreads();  // the sums before these have been read
    reduce_rows<T, C, kIsMax>(p, rows, warp, kPoolWarps, span + lane * C::kElems,
                              shared.warps[warp], sums);
    __syncwarp();  // all lanes have read the rows, which the sums overwrite
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < C::kElems; j += C::kQuad) {
            float* to = &shared.warps[warp].sums[t * C::kTile + lane * C::kElems + j];
            *reinterpret_cast<Q*>(to) = *reinterpret_cast<const Q*>(&sums[t][j]);
        }
    }
    __syncthreads();  // the sums of all warps are written
    if (mine >= C::kSpan) return {};
    const auto sums_of = [&](int i) {
        return *reinterpret_cast<const Q*>(&shared.warps[i].sums[mine]);
    };
    Q total = sums_of(0);
#pragma unroll
    for (int i = 1; i < kPoolWarps; ++i) join<C, kIsMax>(total, sums_of(i));
    return total;
}

// num_group_ctas: CTAs before those for long sequences, if there are any. group_size: sequences of
// each of them. Where max_seqlen rules long ones out, a CTA takes what comes all the same.
template <typename T, typename C, bool kIsMax>
__global__ void __launch_bounds__(kPoolThreads, 2)
    pool_kernel(const __grid_constant__ PoolParams p, const int num_group_ctas,
                const int group_size) {
    extern __shared__ __align__(16) unsigned char smem[];
    auto& shared = *reinterpret_cast<Shared<C>*>(smem);
    release_next_kernel();
    wait_for_prior_kernel();
    if (blockIdx.x >= num_group_ctas) {
        const BlockFinder finder(p);
        const int64_t end = min(finder.total(), max_blocks(p.total_tokens));
        const auto step = static_cast<int>(gridDim.x) - num_group_ctas;
        for (int64_t number = blockIdx.x - num_group_ctas; number < end; number += step) {
            finder.find(number, shared.found_sequence, shared.found_block);
            const RowRange rows = block_of(kept_rows(p, shared.found_sequence), shared.found_block);
            const int mine = static_cast<int>(threadIdx.x) * C::kQuad;
            float* sums = static_cast<float*>(p.workspace) + number * p.hidden_size;
            for (int64_t span = 0; span < p.hidden_size; span += C::kSpan) {
                const auto quad = sum_by_cta<T, C, kIsMax>(p, rows, span, shared);
                if (mine >= C::kSpan || span + mine >= p.hidden_size) continue;
                *reinterpret_cast<Quad<C::kQuad>*>(sums + span + mine) = quad;
            }
        }
        return;
    }
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int64_t begin = int64_t{blockIdx.x} * group_size;
    const int size = static_cast<int>(min(p.batch_size - begin, int64_t{group_size}));
    const auto out_of = [&](int at) { return p.out + (begin + at) * p.hidden_size; };
    if (warp < size) {
        const RowRange rows = kept_rows(p, begin + warp);
        if (rows.count <= kWarpRows) {
            pool_by_warp<T, C, kIsMax>(p, rows, shared.warps[warp], out_of(warp));
        }
    }
    for (int at = 0; at < size; ++at) {
        const RowRange rows = kept_rows(p, begin + at);
        const bool is_long = rows.count > kCtaRows && gridDim.x > num_group_ctas;
        if (rows.count <= kWarpRows || is_long) continue;
        store_row<C>(p, rows, out_of(at),
                     [&](int64_t span) { return sum_by_cta<T, C, kIsMax>(p, rows, span, shared); });
    }
}

// Joins the blocks of each long sequence; the CTA that finds its first one does.
template <typename C, bool kIsMax>
__global__ void __launch_bounds__(kPoolThreads, 4)
    pool_blocks_kernel(const __grid_constant__ PoolParams p) {
    using Q = Quad<C::kQuad>;
    __shared__ int sequence;
    __shared__ int block;
    release_next_kernel();
    wait_for_prior_kernel();
    const BlockFinder finder(p);
    const int64_t end = min(finder.total(), max_blocks(p.total_tokens));
    for (int64_t number = blockIdx.x; number < end; number += gridDim.x) {
        finder.find(number, sequence, block);
        if (block != 0) continue;
        const RowRange rows = kept_rows(p, sequence);
        const auto num_blocks = static_cast<int>(min(int64_t{num_blocks_of(rows)}, end - number));
        const int mine = static_cast<int>(threadIdx.x) * C::kQuad;
        const float* sums = static_cast<const float*>(p.workspace) + number * p.hidden_size + mine;
        store_row<C>(p, rows, p.out + sequence * p.hidden_size, [&](int64_t span) {
            if (mine >= C::kSpan || span + mine >= p.hidden_size) return Q{};
            const auto sums_of = [&](int i) {
                return *reinterpret_cast<const Q*>(sums + span + i * p.hidden_size);
            };
            Q total = sums_of(0);
#pragma unroll 8
            for (int i = 1; i < num_blocks; ++i) join<C, kIsMax>(total, sums_of(i));
            return total;
        });
    }
}

template <typename T, typename C, bool kIsMax>
void launch_pool(const PoolParams& p, cudaStream_t stream) {
    const auto kernel = pool_kernel<T, C, kIsMax>;
    constexpr int kSmemBytes = sizeof(Shared<C>);
    static const bool is_raised = [&] {  // once: the call costs a microsecond
        BYTETX_CUDA_CHECK(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
        return true;
    }();
    static_cast<void>(is_raised);
    const int64_t group_size = std::min((p.batch_size + kCtas - 1) / kCtas, int64_t{kPoolWarps});
    const int64_t num_group_ctas = (p.batch_size + group_size - 1) / group_size;
    const bool is_one_row = p.mode == PoolMode::cls || p.mode == PoolMode::lasttoken;
    const bool has_blocks = !is_one_row && std::min(p.max_seqlen, p.total_tokens) > kCtaRows;
    const int64_t num_block_ctas = has_blocks ? std::min(max_blocks(p.total_tokens), kCtas / 2) : 0;
    launch_kernel(kernel,
                  {dim3(static_cast<unsigned>(num_group_ctas + num_block_ctas)), dim3(kPoolThreads),
                   kSmemBytes, stream},
                  p, static_cast<int>(num_group_ctas), static_cast<int>(group_size));
    if (!has_blocks) return;
    launch_kernel(pool_blocks_kernel<C, kIsMax>,
                  {dim3(static_cast<unsigned>(num_block_ctas)), dim3(kPoolThreads), 0, stream}, p);
}

void check(const PoolParams& p) {
    if (p.batch_size < 0 || p.batch_size > INT32_MAX || p.hidden_size <= 0) {
        throw std::invalid_argument("pool needs 0 <= batch_size < 2^31, hidden_size > 0; got " +
                                    std::to_string(p.batch_size) + " and " +
                                    std::to_string(p.hidden_size));
    }
    const int64_t needed = pool_workspace_bytes(p.total_tokens, p.max_seqlen, p.hidden_size);
    if (p.workspace_bytes < needed) {
        throw std::invalid_argument("pool needs a workspace of " + std::to_string(needed) +
                                    " bytes, got " + std::to_string(p.workspace_bytes));
    }
}

}  // namespace

int64_t pool_workspace_bytes(int64_t total_tokens, int64_t max_seqlen, int64_t hidden_size) {
    if (std::min(max_seqlen, total_tokens) <= kCtaRows) return 0;
    return max_blocks(total_tokens) * hidden_size * static_cast<int64_t>(sizeof(float));
}

void pool(const PoolParams& p, const Launch& launch) {
    check(p);
    if (p.batch_size == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        const auto launch_on = [&]<typename C>() {
            if (p.mode == PoolMode::max) return launch_pool<T, C, true>(p, stream);
            launch_pool<T, C, false>(p, stream);
        };
        if (!fits_vecs<T>(p.hidden_size, p.x, p.out)) {
            return launch_on.template operator()<Columns<1, 4>>();
        }
        const int64_t tiles = (p.hidden_size / kVecSize<T> + kWarpSize - 1) / kWarpSize;
        const auto with_tiles = [&]<int kTiles>() {
            launch_on.template operator()<Columns<kVecSize<T>, kTiles>>();
        };
        if (!dispatch_at_least<2, 3>(tiles, with_tiles)) with_tiles.template operator()<4>();
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
