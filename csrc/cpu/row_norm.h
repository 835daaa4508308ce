// Shared by kernels that work row by row: rows are summed into f32 in L1, then normalised from it.
#pragma once

#include "cpu/rows.h"
#include "cpu/simd.h"

namespace bytetx::cpu::BYTETX_SIMD {

enum class RowNorm { layer, rms };

constexpr int kUnroll = 4;  // independent chains, to hide the latency of an addition

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

// Rows staged at a time. The statistics of a bf16 row end in two chains of some 40 cycles each (sum
// across lanes, then divide or take a root) that only other rows' work fills, and a weight that is
// widened once serves all of them: 4 rows take 134 us where 1 takes 223 ([4096, 384], one Zen 5
// core). An f32 row is bound by its bytes, and bursts of 4 rows only delay the memory: 690 to 900
// us
// ([4096, 768] with residual, out of cache).
template <typename T>
constexpr int kBlockRows = sizeof(T) == 2 ? 4 : 1;
constexpr int64_t kStageFloats = kMaxRowWidth + Vec::kWidth;

inline int64_t padded_width(int64_t n) { return whole_vectors(n + Vec::kWidth - 1); }

template <typename T>
inline bool fits_block(int64_t n) {
    return kBlockRows<T> * padded_width(n) <= kStageFloats;
}

// Columns [i, i + lanes) of out = (h - mean) * scale * weight + bias, for each of the rows.
template <int kRows, typename T, typename Load, typename Store>
inline void normalize_columns(const float* h, int64_t stage_stride, const float* means,
                              const float* scales, const T* weight, const T* bias, T* out,
                              int64_t n, int64_t i, Load load_lanes, Store store_lanes) {
    const Vec factor = load_lanes(weight + i);
    const Vec shift = bias != nullptr ? load_lanes(bias + i) : broadcast(0.0f);
    for (int r = 0; r < kRows; ++r) {
        const Vec centered = load(h + r * stage_stride + i) - broadcast(means[r]);
        const Vec normalized = multiply_add(centered * broadcast(scales[r]), factor, shift);
        store_lanes(out + r * n + i, normalized);
    }
}

// out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias of kRows staged rows with known sums;
// of an RMS norm, the same around zero.
template <RowNorm kNorm, int kRows, typename T>
inline void normalize_rows(float* h, const float* sums, const T* weight, const T* bias, float eps,
                           int64_t n, T* out) {
    const int64_t stage_stride = padded_width(n);
    float means[kRows];
    float scales[kRows];
    for (int r = 0; r < kRows; ++r) {
        means[r] = kNorm == RowNorm::layer ? sums[r] / static_cast<float>(n) : 0.0f;
    }
    for (int r = 0; r < kRows; ++r) {
        scales[r] = sum_of_squares(h + r * stage_stride, n, means[r]) / static_cast<float>(n);
    }
    for (int r = 0; r < kRows; ++r) scales[r] = 1.0f / square_root(scales[r] + eps);
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
        normalize_columns<kRows>(
            h, stage_stride, means, scales, weight, bias, out, n, i,
            [](const T* p) { return load(p); }, [](T* p, Vec v) { store(p, v); });
    }
    if (i == n) return;
    const int rest = static_cast<int>(n - i);
    normalize_columns<kRows>(
        h, stage_stride, means, scales, weight, bias, out, n, i,
        [=](const T* p) { return load_first(p, rest); },
        [=](T* p, Vec v) { store_first(p, rest, v); });
}

// out = a staged row, converted.
template <typename T>
inline void store_row(const float* h, int64_t n, T* out) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(out + i, load(h + i));
    if (i < n) store_first(out + i, static_cast<int>(n - i), load(h + i));
}

}  // namespace bytetx::cpu::BYTETX_SIMD
