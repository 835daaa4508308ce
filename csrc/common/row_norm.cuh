// Layer norm of rows that a kernel has just computed: the tilings a row can have, its statistics
// and its last pass. layer_norm.cu and embedding.cu differ only in how a row comes about.
#pragma once

#include <cstdint>

#include "common/dispatch.cuh"
#include "common/row.cuh"

namespace bytetx {

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

// One thread's share of a row, in f32.
template <typename T, typename Tiling>
using RowRegisters = float[Tiling::kVecsPerThread][kVecSize<T>];

struct RowNorm {
    const void* weight;  // [hidden_size]
    const void* bias;    // [hidden_size], or null for none
    int64_t hidden_size;
    float eps;
};

// This thread's place: vector lane + i * kThreadsPerRow of the row is its i-th.
template <typename Tiling>
struct RowPlace {
    int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    int64_t row = int64_t{blockIdx.x} * Tiling::kRowsPerCta +
                  static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
};

// Centres h around its mean and returns the factor that makes its variance one. The variance is
// taken around the mean, in a second pass over registers, so a large mean costs no digits.
template <typename T, typename Tiling>
__device__ __forceinline__ float centre_row(RowRegisters<T, Tiling>& h, int lane, int num_vecs,
                                            const RowNorm& norm) {
    constexpr int kThreads = Tiling::kThreadsPerRow;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        if (lane + i * kThreads >= num_vecs) continue;
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) sum += h[i][j];
    }
    const float inverse_size = 1.0f / static_cast<float>(norm.hidden_size);
    const float mean = row_sum<kThreads>(sum) * inverse_size;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        if (lane + i * kThreads >= num_vecs) continue;
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) {
            h[i][j] -= mean;
            squares += h[i][j] * h[i][j];
        }
    }
    return rsqrtf(row_sum<kThreads>(squares) * inverse_size + norm.eps);
}

// out = layer norm of h; `out` is the whole tensor, first_vec the row's first vector in it.
template <typename T, typename Tiling>
__device__ __forceinline__ void store_normed_row(RowRegisters<T, Tiling>& h, int lane,
                                                 int64_t first_vec, const RowNorm& norm,
                                                 void* out) {
    const int num_vecs = static_cast<int>(norm.hidden_size / kVecSize<T>);
    const float scale = centre_row<T, Tiling>(h, lane, num_vecs, norm);
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        const Vec<T> weight = load_vec_readonly<T>(norm.weight, v);
        Vec<T> bias{};
        if (norm.bias != nullptr) bias = load_vec_readonly<T>(norm.bias, v);
        Vec<T> normed;
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) {
            normed.value[j] = static_cast<T>(h[i][j] * scale * static_cast<float>(weight.value[j]) +
                                             static_cast<float>(bias.value[j]));
        }
        store_vec<T>(out, first_vec + v, normed);
    }
}

// The same for a row of any size, by a CTA of kCtaThreads, element by element: load_h(i) gives
// element i in f32 and is called three times, of which the last two are served by caches. `out` is
// the row; it may be what load_h reads, for an element is written by its last reader.
template <typename T, typename LoadH>
__device__ __forceinline__ void store_normed_any_row(const LoadH& load_h, const RowNorm& norm,
                                                     T* out) {
    const T* weight = static_cast<const T*>(norm.weight);
    const T* bias = static_cast<const T*>(norm.bias);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < norm.hidden_size; i += kCtaThreads) sum += load_h(i);
    const float inverse_size = 1.0f / static_cast<float>(norm.hidden_size);
    const float mean = row_sum<kCtaThreads>(sum) * inverse_size;

    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < norm.hidden_size; i += kCtaThreads) {
        const float centred = load_h(i) - mean;
        squares += centred * centred;
    }
    const float scale = rsqrtf(row_sum<kCtaThreads>(squares) * inverse_size + norm.eps);

    for (int64_t i = threadIdx.x; i < norm.hidden_size; i += kCtaThreads) {
        const float normed = (load_h(i) - mean) * scale;
        const float shift = bias ? static_cast<float>(bias[i]) : 0.0f;
        out[i] = static_cast<T>(normed * static_cast<float>(weight[i]) + shift);
    }
}

// Calls f.operator()<Tiling>() with the registers that hold a row; returns false where none do.
template <typename T, typename F>
bool dispatch_row_tiling(int64_t hidden_size, F&& f) {
    const int64_t num_vecs = hidden_size / kVecSize<T>;
    if (hidden_size <= kWarpFeatures) {
        return dispatch_at_least<1, 2, 3, 4, 6, 8>(
            (num_vecs + kWarpSize - 1) / kWarpSize, [&]<int kVecs>() {
                f.template operator()<RowTiling<kWarpSize, kWarpsPerCta, kVecs>>();
            });
    }
    return dispatch_at_least<1, 2, 4, 8>(
        (num_vecs + kCtaThreads - 1) / kCtaThreads,
        [&]<int kVecs>() { f.template operator()<RowTiling<kCtaThreads, 1, kVecs>>(); });
}

template <typename Tiling>
unsigned num_row_ctas(int64_t total_tokens) {
    return static_cast<unsigned>((total_tokens + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta);
}

}  // namespace bytetx
