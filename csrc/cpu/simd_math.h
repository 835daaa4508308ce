// Elementwise functions of linear layers' epilogues, for every instruction set but the portable
// one.
#pragma once

#include <initializer_list>

#include "cpu/simd.h"
#include "ops.h"

namespace bytetx::cpu::BYTETX_SIMD {

#if defined(__AVX512F__)

// The second operand where either is NaN.
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float reduce_min(Vec x) { return _mm512_reduce_min_ps(x.v); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x.v); }
inline Vec divide(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec round(Vec x) {
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#elif defined(BYTETX_NEON)

inline Vec min(Vec a, Vec b) {
    return each_half([](auto x, auto y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, a, b);
}
inline Vec max(Vec a, Vec b) {
    return each_half([](auto x, auto y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, a, b);
}
inline float reduce_min(Vec x) { return vminvq_f32(vminq_f32(x.low, x.high)); }
inline float reduce_max(Vec x) { return vmaxvq_f32(vmaxq_f32(x.low, x.high)); }
inline Vec divide(Vec a, Vec b) {
    return each_half([](auto x, auto y) { return vdivq_f32(x, y); }, a, b);
}
inline Vec round(Vec x) {
    return each_half([](auto half) { return vrndnq_f32(half); }, x);
}
inline Vec scale_by_power(Vec x, Vec n) {  // as AVX2's
    const auto scale = [](float32x4_t y, float32x4_t power) {
        const int32x4_t whole = vcvtnq_s32_f32(power), half = vshrq_n_s32(whole, 1);
        const int32x4_t bias = vdupq_n_s32(127);
        const int32x4_t first = vshlq_n_s32(vaddq_s32(half, bias), 23);
        const int32x4_t rest = vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23);
        return vmulq_f32(vmulq_f32(y, vreinterpretq_f32_s32(first)), vreinterpretq_f32_s32(rest));
    };
    return each_half(scale, x, n);
}

#else

inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline float reduce_min(Vec x) {
    __m128 quad = _mm_min_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    quad = _mm_min_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_min_ss(quad, _mm_shuffle_ps(quad, quad, 1)));
}
inline float reduce_max(Vec x) { return -reduce_min({_mm256_sub_ps(_mm256_setzero_ps(), x.v)}); }
inline Vec divide(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec round(Vec x) {
    return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec scale_by_power(Vec x, Vec n) {  // n in -252 to 254; in two steps, each a normal number
    const __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i rest = _mm256_add_epi32(_mm256_sub_epi32(whole, half), bias);
    const Vec second = {_mm256_castsi256_ps(_mm256_slli_epi32(rest, 23))};
    return x * Vec{_mm256_castsi256_ps(first)} * second;
}

#endif

constexpr float kLog2E = 1.44269504088896f;

template <typename T>
inline Vec load_some(const T* p, int64_t n) {
    return n >= Vec::kWidth ? load(p) : load_first(p, static_cast<int>(n));
}

template <typename T>
inline void store_some(T* p, int64_t n, Vec v) {
    n >= Vec::kWidth ? store(p, v) : store_first(p, static_cast<int>(n), v);
}

// 2^x, 3 ulp; x is clamped to what f32 holds, and stays NaN.
inline Vec exp2(Vec x) {
    x = min(broadcast(128.0f), max(broadcast(-150.0f), x));
    const Vec whole = round(x), f = x - whole;
    Vec y = broadcast(1.5353362e-4f);
    for (const float c :
         {1.3398874e-3f, 9.6184374e-3f, 5.5503325e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) {
        y = multiply_add(y, f, broadcast(c));
    }
    return scale_by_power(y, whole);
}

inline Vec exp(Vec x) { return exp2(x * broadcast(kLog2E)); }

// x / (1 + e^-y)
inline Vec gate(Vec x, Vec y) { return divide(x, broadcast(1.0f) + exp(broadcast(0.0f) - y)); }

// x (1 + erf(x / sqrt 2)) / 2, 1e-7 |x| off at most: Abramowitz and Stegun 7.1.26, 1 - erf as a
// polynomial in t = 1 / (1 + p |x|) times e^(-x^2).
inline Vec exact_gelu(Vec x) {
    const Vec none = broadcast(0.0f), one = broadcast(1.0f);
    // Further out the exponential would be a denormal number, which takes 100 cycles.
    const Vec size = min(broadcast(12.0f), max(none - x, x));  // NaN where x is
    const Vec t = divide(one, multiply_add(size, broadcast(0.23164189f), one));
    Vec y = broadcast(1.061405429f);
    for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) {
        y = multiply_add(y, t, broadcast(c));
    }
    const Vec tail = y * t * exp(size * size * broadcast(-0.5f));
    const Vec y_of_finite = max(none, x) - size * tail * broadcast(0.5f);
    return multiply_add(x, none, y_of_finite);  // NaN where x is not finite
}

// x (1 + erf(x / sqrt 2)) / 2, 4e-5 off at most above -20 and -2e-6 x below: a hundredth of what 8
// bits of operands cost, and less than a rounding of x to bf16. The second factor is 1/2 + x
// P(x^2), x clamped to 4.5. Without the division and the exponential of an exact erf it takes a
// quarter of their time. P: least error of the product, fitted by weighted least squares in
// float64.
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

// gelu: computes it, as exactly as the caller needs.
template <typename Gelu>
inline Vec activate(Vec x, Activation activation, Gelu gelu) {
    switch (activation) {
        case Activation::gelu:
            return gelu(x);
        case Activation::gelu_tanh: {
            const Vec inner = multiply_add(x * x * x, broadcast(0.044715f), x);
            return gate(x, inner * broadcast(1.59576912f));
        }
        case Activation::relu:
            return max(broadcast(0.0f), x);  // NaN where x is
        case Activation::silu:
            return gate(x, x);
        case Activation::tanh: {
            const Vec two = broadcast(2.0f);
            return gate(two, x * two) - broadcast(1.0f);
        }
        default:
            return x;
    }
}

}  // namespace bytetx::cpu::BYTETX_SIMD
