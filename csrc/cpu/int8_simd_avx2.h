// AVX2 for the 8-bit linear layer, beyond simd.h; names as in int8_simd_avx512vnni.h.
#pragma once

#include "cpu/int8_linear.h"
#include "cpu/simd_math.h"

namespace bytetx::cpu::avx2 {

// Tile: 6 rows x 16 outputs, 12 sums in registers. AVX2's instruction for bytes adds its products
// up in 16 bits, which saturate; so bytes are widened to 16 bits and multiplied in pairs: exact,
// and as many products an instruction of the multipliers. A step of 4 features splits each vector
// of the weight into features 0, 2 and 1, 3, which rows hold in this order. Bound by: the two
// multipliers, 32 products a cycle of a core, twice those of f32.
constexpr int kTileRows = 6;
constexpr int kTileColumns = 16;
constexpr int32_t kWeightOffset = 128;  // in multiply()'s weights

using Word = int16_t;

struct Ints {
    __m256i v;
};

inline Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline Ints clamp(Ints x, Ints low, Ints high) {
    return {_mm256_min_epi32(_mm256_max_epi32(x.v, low.v), high.v)};
}
inline Ints keep_first(Ints x, int n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_and_si256(x.v, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes))};
}
inline int32_t first_lane(Ints x) { return _mm256_cvtsi256_si32(x.v); }
inline int32_t reduce_sum(Ints x) {
    __m128i quad = _mm_add_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
    quad = _mm_add_epi32(quad, _mm_shuffle_epi32(quad, 0b1110));
    return _mm_cvtsi128_si32(_mm_add_epi32(quad, _mm_shuffle_epi32(quad, 0b01)));
}
inline Ints load_ints(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }

inline Ints round_to_ints(Vec x) { return {_mm256_cvtps_epi32(x.v)}; }
inline Vec to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }

inline void store_words(Word* q, int64_t i, Ints numbers, int64_t room) {
    const __m256i words = _mm256_packs_epi32(numbers.v, numbers.v);  // within each half
    const __m256i ordered = _mm256_shufflelo_epi16(words, _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i all = _mm256_castsi256_si128(_mm256_permute4x64_epi64(ordered, 0b1000));
    if (room >= Vec::kWidth) return _mm_storeu_si128((__m128i*)(q + i), all);
    _mm_storel_epi64((__m128i*)(q + i), all);  // room is a multiple of 4
}

// sum += products of pairs. The empty statement keeps the order of the additions: GCC would add the
// products of two steps first, for which there are no registers.
inline void add_products(__m256i& sum, __m256i weight, __m256i features) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weight, features));
    asm("" : "+x"(sum));
}

inline __m256i broadcast_pair(const Word* q) {
    int32_t pair;
    __builtin_memcpy(&pair, q, sizeof(pair));
    return _mm256_set1_epi32(pair);
}

template <int kRows>
inline void multiply(const Word* q, const uint8_t* weight, int64_t padded,
                     int32_t (*sums)[kTileColumns]) {
    __m256i left[kRows], right[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) left[r] = right[r] = _mm256_setzero_si256();
    const __m256i low_bytes = _mm256_set1_epi16(0xff);
    for (int64_t i = 0; i < padded; i += kInt8Group) {
        const auto* w = (const __m256i*)(weight + i * kInt8Columns);
        __m256i low = _mm256_and_si256(_mm256_loadu_si256(w), low_bytes);
        __m256i high = _mm256_and_si256(_mm256_loadu_si256(w + 1), low_bytes);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            const __m256i features = broadcast_pair(q + r * padded + i);
            add_products(left[r], low, features);
            add_products(right[r], high, features);
        }
        low = _mm256_srli_epi16(_mm256_loadu_si256(w), 8);
        high = _mm256_srli_epi16(_mm256_loadu_si256(w + 1), 8);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            const __m256i features = broadcast_pair(q + r * padded + i + 2);
            add_products(left[r], low, features);
            add_products(right[r], high, features);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        _mm256_storeu_si256((__m256i*)sums[r], left[r]);
        _mm256_storeu_si256((__m256i*)(sums[r] + 8), right[r]);
    }
}

}  // namespace bytetx::cpu::avx2
