// What kernels that work row by row share: a row is summed into f32 in L1, then normalised from it.
#pragma once

#include "cpu/simd.h"

namespace bytetx::cpu::BYTETX_SIMD {

constexpr int kUnroll = 4;                  // independent chains, to hide the latency of an addition

inline int64_t whole_vectors(int64_t n) { return n / Vec::kWidth * Vec::kWidth; }

template <typename T, int kNumRows>
inline Vec sum_of_rows(const T* const (&rows)[kNumRows], int64_t i) {
    Vec sum = load(rows[0] + i);
    for (int r = 1; r < kNumRows; ++r) sum = sum + load(rows[r] + i);
    return sum;
}

// h[0, n) = the sum of the rows; returns the sum of h. Lanes of h up to the next whole vector are
// zeros.
template <typename T, int kNumRows>
inline float stage_row(const T* const (&rows)[kNumRows], int64_t n, float* h) {
    constexpr int kWidth = Vec::kWidth;
    Vec total[kUnroll];
    for (Vec& t : total) t = broadcast(0.0f);
    int64_t i = 0;
    for (; i + kUnroll * kWidth <= n; i += kUnroll * kWidth) {
        for (int u = 0; u < kUnroll; ++u) {
            const Vec v = sum_of_rows(rows, i + u * kWidth);
            store(h + i + u * kWidth, v);
            total[u] = total[u] + v;
        }
    }
    for (; i + kWidth <= n; i += kWidth) {
        const Vec v = sum_of_rows(rows, i);
        store(h + i, v);
        total[0] = total[0] + v;
    }
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        Vec v = load_first(rows[0] + i, rest);
        for (int r = 1; r < kNumRows; ++r) v = v + load_first(rows[r] + i, rest);
        store(h + i, v);
        total[1] = total[1] + v;
    }
    return reduce_sum((total[0] + total[1]) + (total[2] + total[3]));
}

// Sum of (h - mean)^2 over a staged row. Its spare lanes are overwritten with the mean, so that
// they add nothing.
inline float sum_of_squares(float* h, int64_t n, float mean) {
    constexpr int kWidth = Vec::kWidth;
    int64_t padded = whole_vectors(n);
    if (padded < n) {
        padded += kWidth;
        for (int64_t i = n; i < padded; ++i) h[i] = mean;
    }
    const Vec center = broadcast(mean);
    Vec total[kUnroll];
    for (Vec& t : total) t = broadcast(0.0f);
    int64_t i = 0;
    for (; i + kUnroll * kWidth <= padded; i += kUnroll * kWidth) {
        for (int u = 0; u < kUnroll; ++u) {
            const Vec d = load(h + i + u * kWidth) - center;
            total[u] = multiply_add(d, d, total[u]);
        }
    }
    for (; i < padded; i += kWidth) {
        const Vec d = load(h + i) - center;
        total[0] = multiply_add(d, d, total[0]);
    }
    return reduce_sum((total[0] + total[1]) + (total[2] + total[3]));
}

inline float square_root(float x) {
#if defined(__AVX2__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
    return __builtin_sqrtf(x);
#endif
}

// out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias of a staged row whose sum is known.
template <typename T>
inline void normalize_row(float* h, float sum, const T* weight, const T* bias, float eps, int64_t n,
                          T* out) {
    constexpr int kWidth = Vec::kWidth;
    const float mean = sum / static_cast<float>(n);
    const float variance = sum_of_squares(h, n, mean) / static_cast<float>(n);
    const Vec center = broadcast(mean);
    const Vec scale = broadcast(1.0f / square_root(variance + eps));
    const Vec zero = broadcast(0.0f);
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        const Vec shift = bias != nullptr ? load(bias + i) : zero;
        store(out + i, multiply_add((load(h + i) - center) * scale, load(weight + i), shift));
    }
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        const Vec shift = bias != nullptr ? load_first(bias + i, rest) : zero;
        const Vec factor = load_first(weight + i, rest);
        store_first(out + i, rest, multiply_add((load(h + i) - center) * scale, factor, shift));
    }
}

// out = a staged row, converted.
template <typename T>
inline void store_row(const float* h, int64_t n, T* out) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(out + i, load(h + i));
    if (i < n) store_first(out + i, static_cast<int>(n - i), load(h + i));
}

}  // namespace bytetx::cpu::BYTETX_SIMD
