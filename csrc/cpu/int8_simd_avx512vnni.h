// AVX-512 and VNNI for the 8-bit linear layer, beyond simd.h.
#pragma once

#include "cpu/int8_linear.h"
#include "cpu/simd_math.h"

namespace bytetx::cpu::avx512_vnni {

// Tile: 12 rows x 32 outputs, 24 sums in registers; a step of 4 features loads two vectors of the
// weight and one word of each row, which it broadcasts. Bound by: the two multipliers of VNNI, 128
// products a cycle of a core; the epilogue costs about 10 % at k = 384.
constexpr int kTileRows = 12;
constexpr int kTileColumns = 32;
constexpr int32_t kWeightOffset = 128;  // in multiply()'s weights

using Word = int8_t;  // one feature of a rounded row

struct Ints {
    __m512i v;
};

inline Ints broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints clamp(Ints x, Ints low, Ints high) {
    return {_mm512_min_epi32(_mm512_max_epi32(x.v, low.v), high.v)};
}
inline Ints keep_first(Ints x, int n) { return {_mm512_maskz_mov_epi32(first_lanes(n), x.v)}; }
inline int32_t first_lane(Ints x) { return _mm512_cvtsi512_si32(x.v); }
inline int32_t reduce_sum(Ints x) { return _mm512_reduce_add_epi32(x.v); }
inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }

inline Ints round_to_ints(Vec x) { return {_mm512_cvtps_epi32(x.v)}; }
inline Vec to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }

// q[i, i + min(room, kWidth)) = the numbers, each in -128 to 127.
inline void store_words(Word* q, int64_t i, Ints numbers, int64_t room) {
    const int lanes = room < Vec::kWidth ? static_cast<int>(room) : Vec::kWidth;
    _mm512_mask_cvtepi32_storeu_epi8(q + i, first_lanes(lanes), numbers.v);
}

// sums[r] = kTileColumns outputs of row r, of rows q and one panel of the weight. The sums stay in
// registers: GCC keeps an array there only where every index of it is a constant.
template <int kRows>
inline void multiply(const Word* q, const uint8_t* weight, int64_t padded,
                     int32_t (*sums)[kTileColumns]) {
    __m512i left[kRows], right[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) left[r] = right[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < padded; i += kInt8Group) {
        const __m512i low = _mm512_loadu_si512(weight + i * kInt8Columns);
        const __m512i high = _mm512_loadu_si512(weight + i * kInt8Columns + 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            int32_t word;
            __builtin_memcpy(&word, q + r * padded + i, sizeof(word));
            const __m512i features = _mm512_set1_epi32(word);
            left[r] = _mm512_dpbusd_epi32(left[r], low, features);
            right[r] = _mm512_dpbusd_epi32(right[r], high, features);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
        _mm512_store_si512(sums[r], left[r]);
        _mm512_store_si512(sums[r] + 16, right[r]);
    }
}

}  // namespace bytetx::cpu::avx512_vnni
