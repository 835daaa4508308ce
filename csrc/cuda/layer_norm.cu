// Layer norm over packed rows, with the residual addition before it.
//
//   h = x + residual;  out = (h - mean(h)) * rsqrt(mean((h - mean(h))^2) + eps) * weight + bias
//
// x, residual, out [total_tokens, hidden_size] and weight, bias [hidden_size], all of one dtype
// (f32, f16, bf16); h and the statistics are f32 and h is never rounded. What comes after h is in
// common/row_norm.cuh.
//
// layer_norm_kernel: rows whose bytes are a multiple of 16. A row lives in the registers of one
// warp (up to 1024 features; 4 rows a CTA, no shared memory, no barrier) or of one CTA of 256
// threads (up to 16384 f16 or bf16, 8192 f32). Vector v of a row belongs to thread
// v % kThreadsPerRow, so neighbouring threads read neighbouring 16 bytes.
// layer_norm_any_kernel: every other size; one CTA a row, element by element, three passes of which
// the last two come from cache.
//
// Bytes: (2 or 3) * total_tokens * hidden_size * sizeof(T); weight and bias stay in L2.
// Bound by HBM; not yet measured. Both kernels are standard; the fusion is ByteTransformer's
// (arXiv 2210.03052).

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/row_norm.cuh"
#include "ops.h"

namespace bytetx {
namespace {

template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kCtaThreads)
    layer_norm_kernel(const __grid_constant__ LayerNormParams p) {
    const RowPlace<Tiling> place;
    if (place.row >= p.total_tokens) return;  // whole warps: only a tiling without barriers does so
    const int num_vecs = static_cast<int>(p.hidden_size / kVecSize<T>);
    const int64_t first_vec = place.row * num_vecs;

    RowRegisters<T, Tiling> h;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = place.lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        const Vec<T> x = load_vec<T>(p.x, first_vec + v);
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] = static_cast<float>(x.value[j]);
        if (p.residual == nullptr) continue;
        const Vec<T> residual = load_vec<T>(p.residual, first_vec + v);
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] += static_cast<float>(residual.value[j]);
    }
    store_normed_row<T, Tiling>(h, place.lane, first_vec, {p.weight, p.bias, p.hidden_size, p.eps},
                                p.out);
}

template <typename T>
__global__ void __launch_bounds__(kCtaThreads)
    layer_norm_any_kernel(const __grid_constant__ LayerNormParams p) {
    const int64_t first = int64_t{blockIdx.x} * p.hidden_size;
    const T* x = static_cast<const T*>(p.x) + first;
    const T* residual = static_cast<const T*>(p.residual);
    if (residual != nullptr) residual += first;
    const auto load_h = [&](int64_t i) {
        return static_cast<float>(x[i]) + (residual ? static_cast<float>(residual[i]) : 0.0f);
    };
    store_normed_any_row<T>(load_h, {p.weight, p.bias, p.hidden_size, p.eps},
                            static_cast<T*>(p.out) + first);
}

void check(const LayerNormParams& p) {
    if (p.total_tokens < 0 || p.total_tokens > INT32_MAX || p.hidden_size <= 0) {
        throw std::invalid_argument(
            "layer_norm needs 0 <= total_tokens < 2^31, hidden_size > 0; got " +
            std::to_string(p.total_tokens) + " and " + std::to_string(p.hidden_size));
    }
}

}  // namespace

void layer_norm(const LayerNormParams& p, const Launch& launch) {
    check(p);
    if (p.total_tokens == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        const auto launch_tiled = [&]<typename Tiling>() {
            layer_norm_kernel<T, Tiling>
                <<<num_row_ctas<Tiling>(p.total_tokens), Tiling::kCtaThreads, 0, stream>>>(p);
        };
        if (fits_vecs<T>(p.hidden_size, p.x, p.residual, p.out, p.weight, p.bias) &&
            dispatch_row_tiling<T>(p.hidden_size, launch_tiled)) {
            return;
        }
        layer_norm_any_kernel<T>
            <<<static_cast<unsigned>(p.total_tokens), kCtaThreads, 0, stream>>>(p);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
