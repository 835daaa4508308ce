// AVX-512 and VNNI for the 8-bit linear layer, beyond simd.h.
#pragma once

#include "cpu/int8_linear.h"
#include "cpu/simd_math.h"

namespace bytetx::cpu::BYTETX_SIMD {

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

constexpr float kInfinity = __builtin_inff();
constexpr float kNotANumber = __builtin_nanf("");

struct Range {
    float least, most;
};

// bf16 as whole numbers of the same order, and back.
inline __m512i ordered(__m512i bf16) {
    const __m512i sign = _mm512_srai_epi16(bf16, 15);
    return _mm512_xor_si512(bf16, _mm512_and_si512(sign, _mm512_set1_epi16(0x7fff)));
}
inline float from_ordered(int16_t x) {
    return to_float(Bf16{static_cast<uint16_t>(x < 0 ? x ^ 0x7fff : x)});
}

inline __m512i load_pairs(const Bf16* x, int64_t room) {
    if (room >= 32) return _mm512_loadu_si512(x);
    return _mm512_maskz_loadu_epi16(room <= 0 ? 0 : (1u << room) - 1, x);
}

// The least unsigned number of 16 bits.
inline uint16_t reduce_least(__m512i x) {
    const __m256i half =
        _mm256_min_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i quarter =
        _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)));
}

// The least and the largest of a row's values and 0; a NaN is beyond either infinity, as NaN.
inline Range range_of(const Bf16* x, int64_t k) {
    __m512i low = _mm512_setzero_si512(), high = low;
    for (int64_t i = 0; i < k; i += 32) {
        const __m512i v = ordered(load_pairs(x + i, k - i));
        low = _mm512_min_epi16(low, v);
        high = _mm512_max_epi16(high, v);
    }
    const uint16_t least = reduce_least(_mm512_xor_si512(low, _mm512_set1_epi16(-0x8000)));
    const uint16_t most = reduce_least(_mm512_xor_si512(high, _mm512_set1_epi16(0x7fff)));
    return {from_ordered(static_cast<int16_t>(least ^ 0x8000)),
            from_ordered(static_cast<int16_t>(most ^ 0x7fff))};
}

struct Bytes {
    __m512i v;
};

// 64 features as numbers; those from `room` on are zeros.
inline Bytes round_chunk(const Bf16* x, int64_t room, float steps, Ints zero) {
    const __m512 factor = _mm512_set1_ps(steps);
    const __m512i odd_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto round_pairs = [&](__m512i pairs) {  // 8 a lane: the even ones, the odd ones
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, odd_half));
        const __m512i evens = _mm512_cvtps_epi32(_mm512_mul_ps(even, factor));
        const __m512i odds = _mm512_cvtps_epi32(_mm512_mul_ps(odd, factor));
        return _mm512_packs_epi32(_mm512_add_epi32(evens, zero.v), _mm512_add_epi32(odds, zero.v));
    };
    const __m512i first = round_pairs(load_pairs(x, room));
    const __m512i second = round_pairs(load_pairs(x + 32, room - 32));
    const __m512i in_turn =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m512i bytes = _mm512_shuffle_epi8(_mm512_packs_epi16(first, second), in_turn);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i numbers = _mm512_permutexvar_epi64(order, bytes);
    if (room >= 64) return {numbers};
    return {_mm512_maskz_mov_epi8(room <= 0 ? 0 : (uint64_t{1} << room) - 1, numbers)};
}

inline Ints add_bytes(Ints sums, Bytes x) {
    return {_mm512_dpbusd_epi32(sums.v, _mm512_set1_epi8(1), x.v)};
}

inline void store_bytes(Word* q, int64_t room, Bytes x) {
    if (room >= 64) return _mm512_storeu_si512(q, x.v);
    _mm512_mask_storeu_epi8(q, (uint64_t{1} << room) - 1, x.v);
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

}  // namespace bytetx::cpu::BYTETX_SIMD
