// Layer norm over packed rows, with the residual addition before it.
//
//   h = x + residual;  out = (h - mean(h)) * rsqrt(mean((h - mean(h))^2) + eps) * weight + bias
//
// x, residual, out [total_tokens, hidden_size] and weight, bias [hidden_size], all of one dtype
// (f32, f16, bf16); h and the statistics are f32 and h is never rounded. The variance is taken
// around the mean, in a second pass over registers, so a large mean costs no digits.
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
#include "common/dispatch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx {
namespace {

// A type, not a constexpr value: nvcc 13.0 writes host stubs that do not compile for the latter.
template <int kThreads, int kRows, int kVecs>
struct RowTiling {
    static constexpr int kThreadsPerRow = kThreads;
    static constexpr int kRowsPerCta = kRows;
    static constexpr int kVecsPerThread = kVecs;
    static constexpr int kCtaThreads = kThreads * kRows;
};

constexpr int kWarpsPerCta = 4;      // where a warp owns a row
constexpr int kCtaThreads = 256;     // where a CTA owns a row
constexpr int kWarpFeatures = 1024;  // 32 f32 registers a thread; above, a CTA hides latency better

template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kCtaThreads)
    layer_norm_kernel(const __grid_constant__ LayerNormParams p) {
    constexpr int kThreads = Tiling::kThreadsPerRow;
    constexpr int kVecs = Tiling::kVecsPerThread;
    constexpr int kVec = kVecSize<T>;
    const int lane = static_cast<int>(threadIdx.x) % kThreads;
    const int64_t row =
        int64_t{blockIdx.x} * Tiling::kRowsPerCta + static_cast<int>(threadIdx.x) / kThreads;
    if (row >= p.total_tokens) return;  // whole warps: only a tiling without barriers gets here
    const int num_vecs = static_cast<int>(p.hidden_size / kVec);
    const int64_t first_vec = row * num_vecs;

    float h[kVecs][kVec];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int v = lane + i * kThreads;
        if (v >= num_vecs) continue;
        const Vec<T> x = load_vec<T>(p.x, first_vec + v);
#pragma unroll
        for (int j = 0; j < kVec; ++j) h[i][j] = static_cast<float>(x.value[j]);
        if (p.residual != nullptr) {
            const Vec<T> residual = load_vec<T>(p.residual, first_vec + v);
#pragma unroll
            for (int j = 0; j < kVec; ++j) h[i][j] += static_cast<float>(residual.value[j]);
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum += h[i][j];
    }
    const float inverse_size = 1.0f / static_cast<float>(p.hidden_size);
    const float mean = row_sum<kThreads>(sum) * inverse_size;

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (lane + i * kThreads >= num_vecs) continue;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            h[i][j] -= mean;
            squares += h[i][j] * h[i][j];
        }
    }
    const float scale = rsqrtf(row_sum<kThreads>(squares) * inverse_size + p.eps);

#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int v = lane + i * kThreads;
        if (v >= num_vecs) continue;
        const Vec<T> weight = load_vec_readonly<T>(p.weight, v);
        Vec<T> bias{};
        if (p.bias != nullptr) bias = load_vec_readonly<T>(p.bias, v);
        Vec<T> out;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            const float normed = h[i][j] * scale;
            out.value[j] = static_cast<T>(normed * static_cast<float>(weight.value[j]) +
                                          static_cast<float>(bias.value[j]));
        }
        store_vec<T>(p.out, first_vec + v, out);
    }
}

template <typename T>
__global__ void __launch_bounds__(kCtaThreads)
    layer_norm_any_kernel(const __grid_constant__ LayerNormParams p) {
    const int64_t first = int64_t{blockIdx.x} * p.hidden_size;
    const T* x = static_cast<const T*>(p.x) + first;
    const T* residual = static_cast<const T*>(p.residual);
    if (residual != nullptr) residual += first;
    const T* weight = static_cast<const T*>(p.weight);
    const T* bias = static_cast<const T*>(p.bias);
    T* out = static_cast<T*>(p.out) + first;  // may be x: an element is written by its last reader
    const auto load_h = [&](int64_t i) {
        return static_cast<float>(x[i]) + (residual ? static_cast<float>(residual[i]) : 0.0f);
    };

    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.hidden_size; i += kCtaThreads) sum += load_h(i);
    const float inverse_size = 1.0f / static_cast<float>(p.hidden_size);
    const float mean = row_sum<kCtaThreads>(sum) * inverse_size;

    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < p.hidden_size; i += kCtaThreads) {
        const float centred = load_h(i) - mean;
        squares += centred * centred;
    }
    const float scale = rsqrtf(row_sum<kCtaThreads>(squares) * inverse_size + p.eps);

    for (int64_t i = threadIdx.x; i < p.hidden_size; i += kCtaThreads) {
        const float normed = (load_h(i) - mean) * scale;
        const float shift = bias ? static_cast<float>(bias[i]) : 0.0f;
        out[i] = static_cast<T>(normed * static_cast<float>(weight[i]) + shift);
    }
}

template <typename T, typename Tiling>
void launch_tiled(const LayerNormParams& p, cudaStream_t stream) {
    const int64_t num_ctas = (p.total_tokens + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
    layer_norm_kernel<T, Tiling>
        <<<static_cast<unsigned>(num_ctas), Tiling::kCtaThreads, 0, stream>>>(p);
}

// Returns false where no register tile holds the row.
template <typename T>
bool launch_in_registers(const LayerNormParams& p, cudaStream_t stream) {
    const int64_t num_vecs = p.hidden_size / kVecSize<T>;
    if (p.hidden_size <= kWarpFeatures) {
        return dispatch_at_least<1, 2, 3, 4, 6, 8>(
            (num_vecs + kWarpSize - 1) / kWarpSize, [&]<int kVecs>() {
                launch_tiled<T, RowTiling<kWarpSize, kWarpsPerCta, kVecs>>(p, stream);
            });
    }
    return dispatch_at_least<1, 2, 4, 8>(
        (num_vecs + kCtaThreads - 1) / kCtaThreads,
        [&]<int kVecs>() { launch_tiled<T, RowTiling<kCtaThreads, 1, kVecs>>(p, stream); });
}

bool is_aligned(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % kVecBytes == 0;  // null counts as aligned
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
        const bool fits_vecs = p.hidden_size % kVecSize<T> == 0 && is_aligned(p.x) &&
                               is_aligned(p.residual) && is_aligned(p.out) &&
                               is_aligned(p.weight) && is_aligned(p.bias);
        if (fits_vecs && launch_in_registers<T>(p, stream)) return;
        layer_norm_any_kernel<T>
            <<<static_cast<unsigned>(p.total_tokens), kCtaThreads, 0, stream>>>(p);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
