// The norm of rows whose features come in parts: a row a CTA, eight features a thread up to 2048,
// every part's loads at once.
//
//   h = sum of parts + bias + residual;  sum_out = h;  d = norm(h) * weight + shift
#pragma once

#include "common/row_norm.cuh"
#include "gemm/parts.cuh"
#include "split_norm_ops.h"

namespace bytetx::gemm {

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(Tiling::kCtaThreads, 1)
    norm_parts_kernel(const __grid_constant__ SplitNormParams p, const int num_parts) {
    static_assert(kVecSize<T> == 8 && Tiling::kRowsPerCta == 1);
    const int lane = static_cast<int>(threadIdx.x);
    const int num_vecs = static_cast<int>(p.n / 8);
    const int64_t row = blockIdx.x;
    release_next_kernel();
    const RowParameter<Tiling> weight(p.weight, lane, num_vecs), shift(p.shift, lane, num_vecs);
    const RowParameter<Tiling> bias(p.bias, lane, num_vecs);
    wait_for_prior_kernel();
    RawRow<Tiling> residual;
    if (p.residual != nullptr) residual.load(p.residual, row, lane, num_vecs, load_once);
    RowRegisters<T, Tiling> h = {};
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        const float* at = p.parts + row * p.n + part_column(v);
#pragma unroll 8
        for (int part = 0; part < num_parts; ++part, at += p.m * p.n) {
            const float4 low = __ldcg(reinterpret_cast<const float4*>(at));
            const float4 high = __ldcg(reinterpret_cast<const float4*>(at + kPartHalf));
            h[i][0] += low.x, h[i][1] += low.y, h[i][2] += low.z, h[i][3] += low.w;
            h[i][4] += high.x, h[i][5] += high.y, h[i][6] += high.z, h[i][7] += high.w;
        }
        const uint4 biases = p.bias == nullptr ? uint4{} : bias.get(i, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            h[i][j] += element<T>(biases, j) + element<T>(residual.words[i], j);
        }
    }
    if (p.sum_out != nullptr) store_row<T, Tiling>(p.sum_out, h, lane, row, num_vecs);
    store_normalized_row<T, Tiling, kNorm>(h, lane, row, weight, shift, p.n, p.eps,
                                           {p.d, nullptr, nullptr, false});
}

template <typename T, typename Tiling>
void launch_norm_parts(const SplitNormParams& p, int num_parts, cudaStream_t stream) {
    const LaunchShape shape{dim3(static_cast<unsigned>(p.m)), dim3(Tiling::kCtaThreads), 0, stream};
    if (p.is_rms) {
        launch_kernel(norm_parts_kernel<T, Tiling, RowNorm::rms>, shape, p, num_parts);
    } else {
        launch_kernel(norm_parts_kernel<T, Tiling, RowNorm::layer>, shape, p, num_parts);
    }
}

// Rows of up to 8192 features.
template <typename T>
void norm_parts(const SplitNormParams& p, int num_parts, cudaStream_t stream) {
    const int64_t num_vecs = p.n / 8;
    if (num_vecs <= 4 * kWarpSize) {
        dispatch_at_least<1, 2, 3, 4>((num_vecs + kWarpSize - 1) / kWarpSize, [&]<int kWarps>() {
            launch_norm_parts<T, SpreadTiling<kWarps>>(p, num_parts, stream);
        });
    } else {
        dispatch_at_least<1, 2, 4>((num_vecs + kCtaThreads - 1) / kCtaThreads, [&]<int kVecs>() {
            launch_norm_parts<T, RowTiling<kCtaThreads, 1, kVecs>>(p, num_parts, stream);
        });
    }
}

}  // namespace bytetx::gemm
