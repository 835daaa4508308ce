// The 8-bit linear layer's kernel: rows to 8 bits, products in integers, epilogue in f32.
//
// Formula: with x about s (q - z) and the weight t w, a result is
//   act(s (t sum(q (w + 128)) - 128 t sum(q) - z t sum(w)) + bias)
// since VNNI multiplies unsigned by signed bytes: the weight is stored with 128 added, and
// 128 sum(q) is taken off in 32-bit integers, exactly. (Where signed bytes are multiplied by
// signed ones, the kernel takes 128 from the weights instead.) Every instruction set computes the
// same integers.
//
// Rows are rounded each on its own, to the 256 numbers between its least and largest value:
// asymmetric, because rows behind a GELU have few negative values. Real texts through
// all-MiniLM-L6-v2 keep a mean cosine of 0.9990 to fp32 vectors, symmetric rounding 0.9978.
#pragma once

#include "cpu/int8_linear.h"
#include "cpu/simd_math.h"
#if defined(__AVX512VNNI__)
#include "cpu/int8_simd_avx512vnni.h"
#elif defined(BYTETX_NEON)
#include "cpu/int8_simd_neon.h"
#else
#include "cpu/int8_simd_avx2.h"
#endif

namespace bytetx::cpu::BYTETX_SIMD {

template <typename T>
inline QuantizedRow quantize_row(const T* x, int64_t k, Word* q) {
    constexpr int kWidth = Vec::kWidth;
    const Vec none = broadcast(0.0f);
    Vec low = none, high = none, faults = none;
    for (int64_t i = 0; i < k; i += kWidth) {
        const Vec v = load_some(x + i, k - i);
        low = min(low, v);
        high = max(high, v);
        faults = multiply_add(v, none, faults);  // NaN where v is not finite
    }
    const float fault = reduce_sum(faults);
    const float least = reduce_min(low), most = reduce_max(high);
    // A range that f32 cannot divide is rounded to zeros, far below what any result can show.
    const float range = most - least > 1e-30f ? most - least : 255.0f;
    const float scale = range / 255.0f, steps = 255.0f / range;
    const Ints zero = round_to_ints(broadcast(-128.0f - least * steps));
    Ints sums = broadcast_int(0);
    const Ints first = broadcast_int(-128), last = broadcast_int(127);
    const int64_t padded = padded_features(k);
    for (int64_t i = 0; i < padded; i += kWidth) {
        const Vec v = load_some(x + i, k - i);
        Ints number = clamp(round_to_ints(v * broadcast(steps)) + zero, first, last);
        // Features beyond k count nothing.
        if (k - i < kWidth) number = keep_first(number, static_cast<int>(k - i));
        sums = sums + number;
        store_words(q, i, number, padded - i);
    }
    return {scale + fault, static_cast<float>(first_lane(zero)), kWeightOffset * reduce_sum(sums)};
}

// x (1 + erf(x / sqrt 2)) / 2, 4e-5 off at most above -20 and -2e-6 x below, a hundredth of what
// the 8 bits of its operands cost: the second factor is 1/2 + x P(x^2), x clamped to 4.5. Without
// the division and the exponential of an exact erf it takes a quarter of their time. P: least error
// of the product, fitted by weighted least squares in float64.
inline Vec fast_gelu(Vec x) {
    const Vec near = max(broadcast(-4.5f), min(broadcast(4.5f), x));  // NaN where x is
    const Vec square = near * near;
    Vec y = broadcast(-1.39975238e-12f);
    for (const float c :
         {1.69698880e-10f, -9.19241305e-09f, 2.95858570e-07f, -6.36481445e-06f, 9.78675234e-05f,
          -1.12265837e-03f, 9.83312540e-03f, -6.63369671e-02f, 3.98883760e-01f}) {
        y = multiply_add(y, square, broadcast(c));
    }
    return x * multiply_add(near, y, broadcast(0.5f));
}

// kRows rows and kTileColumns outputs. q: the first row's numbers; weight: the first output's.
template <typename T, int kRows>
inline void multiply_tile(const Int8LinearParams& p, const Word* q, const QuantizedRow* rows,
                          int64_t row, const uint8_t* weight, int64_t column) {
    alignas(64) int32_t sums[kRows][kTileColumns];
    multiply<kRows>(q, weight, padded_features(p.k), sums);
    for (int64_t c = 0; c < kTileColumns; c += Vec::kWidth) {
        const int64_t begin = column + c;
        if (begin >= p.n) return;
        const Vec scale = load(p.weight_scale + begin), bias = load(p.bias + begin);
        const Vec weight_sum = load(p.weight_sum + begin), none = broadcast(0.0f);
        for (int r = 0; r < kRows; ++r) {
            const Ints sum = load_ints(sums[r] + c) - broadcast_int(rows[r].shift);
            const Vec offset = none - weight_sum * broadcast(rows[r].zero);
            const Vec product = multiply_add(to_floats(sum), scale, offset);
            const Vec y = multiply_add(product, broadcast(rows[r].scale), bias);
            T* d = static_cast<T*>(p.d) + (row + r) * p.n + begin;
            store_some(d, p.n - begin,
                       activate(y, p.activation, [](Vec v) { return fast_gelu(v); }));
        }
    }
}

template <typename T, int kRows>
inline void multiply_rest(const Int8LinearParams& p, const Word* q, const QuantizedRow* rows,
                          int64_t row, const uint8_t* weight, int64_t column, int num_rows) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows) {
            return multiply_tile<T, kRows>(p, q, rows, row, weight, column);
        }
        multiply_rest<T, kRows - 1>(p, q, rows, row, weight, column, num_rows);
    }
}

template <typename T>
inline void multiply_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, Word* q, QuantizedRow* rows) {
    const int64_t padded = padded_features(p.k), num_rows = end - begin;
    const T* x = static_cast<const T*>(p.x) + begin * p.k;
    for (int64_t r = 0; r < num_rows; ++r) rows[r] = quantize_row(x + r * p.k, p.k, q + r * padded);
    for (int64_t column = first * kInt8Columns; column < last * kInt8Columns;
         column += kTileColumns) {
        const int64_t panel = column / kInt8Columns * kInt8Columns;
        const uint8_t* weight = p.weight + panel * padded + (column - panel) * kInt8Group;
        int64_t r = 0;
        for (; r + kTileRows <= num_rows; r += kTileRows) {
            multiply_tile<T, kTileRows>(p, q + r * padded, rows + r, begin + r, weight, column);
        }
        const int rest = static_cast<int>(num_rows - r);
        multiply_rest<T, kTileRows - 1>(p, q + r * padded, rows + r, begin + r, weight, column,
                                        rest);
    }
}

inline void run_int8_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, void* q, QuantizedRow* rows) {
    auto* words = static_cast<Word*>(q);
    const bool is_f32 = p.dtype == DType::f32;
    const auto multiply_rows = is_f32 ? multiply_block<float> : multiply_block<Bf16>;
    multiply_rows(p, begin, end, first, last, words, rows);
}

// Declared here so that the constant, which another file names, is not file-local.
extern const Int8Kernel kInt8Kernel;

constexpr Int8Kernel make_int8_kernel() { return {run_int8_block, sizeof(Word), kTileRows}; }

}  // namespace bytetx::cpu::BYTETX_SIMD
