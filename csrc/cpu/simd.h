// One f32 vector type, as wide as the flags that the including file is compiled with allow.
//
// Row kernels are written once against Vec and compiled once an instruction set, each file with its
// own flags. All of it lives in a namespace named after the set, and includes nothing that defines
// inline functions of its own: the linker keeps one copy of an inline function, and an AVX-512 copy
// must never be the one that a machine without AVX-512 runs.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#if !defined(__clang__)  // GCC 12 warns of its own header's deliberately undefined vectors
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(BYTETX_NEON)
#include <arm_neon.h>
#endif

// The build says which of ARM's sets a file is for: compilers for macOS have the instructions of
// its first processor in every file.
#if defined(__AMX_INT8__)
#define BYTETX_SIMD amx_int8
#elif defined(__AVX512BF16__)
#define BYTETX_SIMD avx512_bf16
#elif defined(__AVX512VNNI__)
#define BYTETX_SIMD avx512_vnni
#elif defined(__AVX512F__)
#define BYTETX_SIMD avx512
#elif defined(__AVX2__)
#define BYTETX_SIMD avx2
#elif defined(BYTETX_NEON_BF16)
#define BYTETX_SIMD neon_bf16
#elif defined(BYTETX_NEON_I8MM)
#define BYTETX_SIMD neon_i8mm
#elif defined(BYTETX_NEON_DOTPROD)
#define BYTETX_SIMD neon_dotprod
#elif defined(BYTETX_NEON)
#define BYTETX_SIMD neon
#else
#define BYTETX_SIMD portable
#endif

// An instruction that adds the products of two neighbouring bf16 to one f32.
#if defined(__AVX512BF16__) || defined(BYTETX_NEON_BF16)
#define BYTETX_BF16_DOT
#endif

namespace bytetx::cpu::BYTETX_SIMD {

struct Bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }

// Round to nearest even; a NaN stays one (its payload could round up to infinity otherwise).
inline Bf16 to_bf16(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__AVX512F__)

struct Vec {
    static constexpr int kWidth = 16;
    __m512 v;
};

inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline float reduce_sum(Vec a) { return _mm512_reduce_add_ps(a.v); }

// The larger, or NaN where either is (max_ps alone returns its second operand then).
inline Vec max_or_nan(Vec a, Vec b) {
    const __m512 larger = _mm512_max_ps(b.v, a.v);
    return {_mm512_mask_mov_ps(larger, _mm512_cmp_ps_mask(b.v, b.v, _CMP_UNORD_Q), b.v)};
}

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec widen(__m256i bf16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16))};
}
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const Bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline Vec load_first(const Bf16* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

inline __m256i narrow(Vec a) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i rounded = _mm512_mask_mov_epi32(
        _mm512_add_epi32(bits, bias), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(Bf16* p, Vec a) { _mm256_storeu_si256((__m256i*)p, narrow(a)); }
inline void store_first(float* p, int n, Vec a) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline void store_first(Bf16* p, int n, Vec a) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a));
}

#else

#if defined(__AVX2__)

struct Vec {
    static constexpr int kWidth = 8;
    __m256 v;
};

inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline float reduce_sum(Vec a) {
    const __m128 quad = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline Vec max_or_nan(Vec a, Vec b) {
    const __m256 is_nan = _mm256_cmp_ps(b.v, b.v, _CMP_UNORD_Q);
    return {_mm256_blendv_ps(_mm256_max_ps(b.v, a.v), b.v, is_nan)};
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const Bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(Bf16* p, Vec a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256 quiet = _mm256_or_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
    const __m256 is_nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
    const __m256 rounded =
        _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_add_epi32(bits, bias)), quiet, is_nan);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(rounded), 16);
    const __m256i packed = _mm256_packus_epi32(high, high);  // within each half
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
}

#elif defined(BYTETX_NEON)

// Two registers, so that what is written for the 16 registers of AVX2 fills the 32 of ARM.
struct Vec {
    static constexpr int kWidth = 8;
    float32x4_t low, high;
};

template <typename Half>
inline Vec each_half(Half half, Vec a) {
    return {half(a.low), half(a.high)};
}
template <typename Half>
inline Vec each_half(Half half, Vec a, Vec b) {
    return {half(a.low, b.low), half(a.high, b.high)};
}

inline Vec broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline float reduce_sum(Vec a) {  // in AVX2's order
    const float32x4_t quad = vaddq_f32(a.low, a.high);
    const float32x2_t pair = vadd_f32(vget_low_f32(quad), vget_high_f32(quad));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
inline Vec max_or_nan(Vec a, Vec b) {
    return each_half([](auto x, auto y) { return vmaxq_f32(x, y); }, a, b);
}

inline float32x4_t widen(uint16x4_t bf16) { return vreinterpretq_f32_u32(vshll_n_u16(bf16, 16)); }
inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline Vec load(const Bf16* p) {
    const uint16x8_t bits = vld1q_u16(&p->bits);
    return {widen(vget_low_u16(bits)), widen(vget_high_u16(bits))};
}
inline uint16x4_t narrow(float32x4_t x) {
#if defined(BYTETX_NEON_BF16)
    return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
#endif
}
inline void store(float* p, Vec a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
inline void store(Bf16* p, Vec a) {
    vst1q_u16(&p->bits, vcombine_u16(narrow(a.low), narrow(a.high)));
}

#else

struct Vec {
    static constexpr int kWidth = 8;
    float v[kWidth];
};

template <typename Lane>
inline Vec each_lane(Lane lane) {
    Vec r;
    for (int i = 0; i < Vec::kWidth; ++i) r.v[i] = lane(i);
    return r;
}
inline Vec broadcast(float x) {
    return each_lane([=](int) { return x; });
}
inline Vec operator+(Vec a, Vec b) {
    return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
    return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
    return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
inline float reduce_sum(Vec a) {
    const float low = (a.v[0] + a.v[4]) + (a.v[2] + a.v[6]);
    return low + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline Vec max_or_nan(Vec a, Vec b) {
    return each_lane([&](int i) {
        const float larger = b.v[i] > a.v[i] ? b.v[i] : a.v[i];
        return b.v[i] != b.v[i] ? b.v[i] : larger;
    });
}
inline Vec load(const float* p) {
    return each_lane([=](int i) { return p[i]; });
}
inline Vec load(const Bf16* p) {
    return each_lane([=](int i) { return to_float(p[i]); });
}
inline void store(float* p, Vec a) {
    for (int i = 0; i < Vec::kWidth; ++i) p[i] = a.v[i];
}
inline void store(Bf16* p, Vec a) {
    for (int i = 0; i < Vec::kWidth; ++i) p[i] = to_bf16(a.v[i]);
}

#endif

// Without mask registers the tail of a row goes through a vector on the stack.
template <typename T>
inline Vec load_first(const T* p, int n) {
    T lanes[Vec::kWidth] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
template <typename T>
inline void store_first(T* p, int n, Vec a) {
    T lanes[Vec::kWidth];
    store(lanes, a);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

#endif

}  // namespace bytetx::cpu::BYTETX_SIMD
