// The 8-bit linear layer's two ends: rows to 8 bits, and the epilogue of their products in f32.
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

constexpr int64_t kChunk = 64;  // features of a row that lie in one piece

// How a row from its least to its most, 0 among them, becomes numbers: round(x * steps) + zero.
struct Rounding {
    float scale;
    float steps;
    Ints zero;
};

inline Rounding rounding_of(float least, float most) {
    // A range that f32 cannot divide is rounded to zeros, far below what any result can show.
    const float range = most - least > 1e-30f ? most - least : 255.0f;
    const float steps = 255.0f / range;
    return {range / 255.0f, steps, round_to_ints(broadcast(-128.0f - least * steps))};
}

// x [k] to q: `padded` words, a multiple of kInt8Group, those beyond k zeros; chunk: words from the
// first of kChunk features to the first of the next.
template <typename T>
inline QuantizedRow quantize_row(const T* x, int64_t k, Word* q, int64_t padded, int64_t chunk) {
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
    const Rounding rounding = rounding_of(reduce_min(low), reduce_max(high));
    Ints sums = broadcast_int(0);
    const Ints first = broadcast_int(-128), last = broadcast_int(127);
    for (int64_t i = 0; i < padded; i += kWidth) {
        Ints number = broadcast_int(0);
        if (i < k) {
            const Vec v = load_some(x + i, k - i);
            const Ints rounded = round_to_ints(v * broadcast(rounding.steps));
            number = clamp(rounded + rounding.zero, first, last);
            // Features beyond k count nothing.
            if (k - i < kWidth) number = keep_first(number, static_cast<int>(k - i));
        }
        sums = sums + number;
        store_words(q + i / kChunk * chunk, i % kChunk, number, padded - i);
    }
    return {rounding.scale + fault, static_cast<float>(first_lane(rounding.zero)),
            kWeightOffset * reduce_sum(sums)};
}

#if defined(__AVX512VNNI__)
// The same numbers of a row of bf16, which has the order of whole numbers once those below zero are
// turned round: 64 features at a time.
inline QuantizedRow quantize_row(const Bf16* x, int64_t k, Word* q, int64_t padded, int64_t chunk) {
    const auto [least, most] = range_of(x, k);
    const bool is_finite = least > -kInfinity && most < kInfinity;
    const Rounding rounding = is_finite ? rounding_of(least, most) : rounding_of(0.0f, 0.0f);
    Ints sums = broadcast_int(0);
    for (int64_t i = 0; i < padded; i += kChunk, q += chunk) {
        const Bytes bytes = round_chunk(x + i, k - i, rounding.steps, rounding.zero);
        sums = add_bytes(sums, bytes);
        store_bytes(q, padded - i, bytes);
    }
    return {is_finite ? rounding.scale : kNotANumber, static_cast<float>(first_lane(rounding.zero)),
            kWeightOffset * reduce_sum(sums)};
}
#endif

// A vector of outputs in the epilogue, from `column` on.
struct OutputVectors {
    Vec scale, bias, weight_sum;

    OutputVectors(const Int8LinearParams& p, int64_t column)
        : scale(load(p.weight_scale + column)),
          bias(load(p.bias + column)),
          weight_sum(load(p.weight_sum + column)) {}
};

// Row r's results from its sums: p.d[r, column, ...).
template <typename T>
inline void finish_sums(const Int8LinearParams& p, const OutputVectors& outputs,
                        const int32_t* sums, const QuantizedRow& row, int64_t r, int64_t column) {
    const Ints sum = load_ints(sums) - broadcast_int(row.shift);
    const Vec offset = broadcast(0.0f) - outputs.weight_sum * broadcast(row.zero);
    const Vec product = multiply_add(to_floats(sum), outputs.scale, offset);
    const Vec y = multiply_add(product, broadcast(row.scale), outputs.bias);
    store_some(static_cast<T*>(p.d) + r * p.n + column, p.n - column,
               activate(y, p.activation, [](Vec v) { return fast_gelu(v); }));
}

}  // namespace bytetx::cpu::BYTETX_SIMD
