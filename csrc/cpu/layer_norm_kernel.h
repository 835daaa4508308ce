// The row kernel of layer_norm, included by one file for each instruction set.
//
// Formula: out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias, h = x + residual; f32 or bf16
// rows, f32 inside. A row is read once, summed into an f32 copy in L1, and the variance is taken
// around the known mean (two passes over the copy: no cancellation when the mean is large). Bytes:
// each of x, residual and out once; what bounds it is the cache or memory they come from. The
// result of a row depends on nothing but the row. Source: standard; the fusion with the residual as
// in ByteTransformer (arXiv 2210.03052), section III.B.
#pragma once

#include "cpu/row_norm.h"
#include "cpu/rows.h"

namespace bytetx::cpu::BYTETX_SIMD {

template <typename T>
inline void layer_norm_rows_of(const LayerNormParams& p, int64_t begin, int64_t end) {
    alignas(64) float h[kMaxRowWidth + Vec::kWidth];
    const int64_t n = p.hidden_size;
    const T* weight = static_cast<const T*>(p.weight);
    const T* bias = static_cast<const T*>(p.bias);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * n;
        T* out = static_cast<T*>(p.out) + row * n;
        float sum;
        if (p.residual != nullptr) {
            const T* const rows[2] = {x, static_cast<const T*>(p.residual) + row * n};
            sum = stage_row(rows, n, h);
        } else {
            const T* const rows[1] = {x};
            sum = stage_row(rows, n, h);
        }
        normalize_row(h, sum, weight, bias, p.eps, n, out);
    }
}

inline void layer_norm_rows(const LayerNormParams& p, int64_t begin, int64_t end) {
    if (p.dtype == DType::f32) return layer_norm_rows_of<float>(p, begin, end);
    layer_norm_rows_of<Bf16>(p, begin, end);
}

}  // namespace bytetx::cpu::BYTETX_SIMD
