// The row kernel of layer_norm and rms_norm, included by one file for each instruction set.
//
// Formula: out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias, or h / sqrt(mean(h^2) + eps) *
// weight; h = x + residual, which sum_out gets where it is wanted; f32 or bf16 rows, f32 inside. A
// block of rows is read once, summed into f32 copies in L1, and the variance is taken around the
// known mean (two passes over the copy: no cancellation when the mean is large). Bytes: each of x,
// residual and out once; what bounds it is the cache or memory they come from. The result of a row
// depends on nothing but the row. One Zen 5 core, 2026-11, against the bytes that torch.copy_
// moves: f32 [4096, 384] 83 GB/s of 134, bf16 47 GB/s (bound by conversions). Source: standard; the
// fusion with the residual as in ByteTransformer (arXiv 2210.03052), 3.2.
#pragma once

#include "cpu/row_norm.h"
#include "cpu/rows.h"

namespace bytetx::cpu::BYTETX_SIMD {

template <RowNorm kNorm, typename T, int kRows>
inline void norm_block(const NormParams& p, int64_t row, float* h) {
    const int64_t n = p.hidden_size;
    const T* x = static_cast<const T*>(p.x) + row * n;
    const T* residual = static_cast<const T*>(p.residual);
    float sums[kRows];
    for (int r = 0; r < kRows; ++r) {
        float* staged = h + r * padded_width(n);
        if (residual != nullptr) {
            const T* const rows[2] = {x + r * n, residual + (row + r) * n};
            sums[r] = stage_row(rows, n, staged);
        } else {
            const T* const rows[1] = {x + r * n};
            sums[r] = stage_row(rows, n, staged);
        }
        if (p.sum_out != nullptr) store_row(staged, n, static_cast<T*>(p.sum_out) + (row + r) * n);
    }
    normalize_rows<kNorm, kRows>(h, sums, static_cast<const T*>(p.weight),
                                 static_cast<const T*>(p.bias), p.eps, n,
                                 static_cast<T*>(p.out) + row * n);
}

template <RowNorm kNorm, typename T>
inline void norm_rows_of(const NormParams& p, int64_t begin, int64_t end) {
    alignas(64) float h[kStageFloats];
    int64_t row = begin;
    if (fits_block<T>(p.hidden_size)) {
        constexpr int kRows = kBlockRows<T>;
        for (; row + kRows <= end; row += kRows) norm_block<kNorm, T, kRows>(p, row, h);
    }
    for (; row < end; ++row) norm_block<kNorm, T, 1>(p, row, h);
}

template <RowNorm kNorm>
inline void norm_rows(const NormParams& p, int64_t begin, int64_t end) {
    if (p.dtype == DType::f32) return norm_rows_of<kNorm, float>(p, begin, end);
    norm_rows_of<kNorm, Bf16>(p, begin, end);
}

}  // namespace bytetx::cpu::BYTETX_SIMD
