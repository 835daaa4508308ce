// ARM for the 8-bit linear layer, beyond simd.h; names as in int8_simd_avx512vnni.h.
#pragma once

#include "cpu/int8_linear.h"
#include "cpu/simd_math.h"

namespace bytetx::cpu::BYTETX_SIMD {

// Tile: 6 rows x 16 outputs, 24 sums in registers. Bound by: the multipliers; an instruction makes
// 32 products (i8mm), 16 (dot product) or 4 (neither).
constexpr int kTileRows = 6;
constexpr int kTileColumns = 16;

struct Ints {
    int32x4_t low, high;
};

inline Ints broadcast_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Ints operator+(Ints a, Ints b) {
    return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}
inline Ints operator-(Ints a, Ints b) {
    return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)};
}
inline Ints clamp(Ints x, Ints low, Ints high) {
    return {vminq_s32(vmaxq_s32(x.low, low.low), high.low),
            vminq_s32(vmaxq_s32(x.high, low.high), high.high)};
}
inline Ints keep_first(Ints x, int n) {
    const int32x4_t lanes = {0, 1, 2, 3};
    const auto keep = [=](int32x4_t half, int count) {
        const uint32x4_t is_kept = vcltq_s32(lanes, vdupq_n_s32(count));
        return vandq_s32(half, vreinterpretq_s32_u32(is_kept));
    };
    return {keep(x.low, n), keep(x.high, n - 4)};
}
inline int32_t first_lane(Ints x) { return vgetq_lane_s32(x.low, 0); }
inline int32_t reduce_sum(Ints x) { return vaddvq_s32(vaddq_s32(x.low, x.high)); }
inline Ints load_ints(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }

inline Ints round_to_ints(Vec x) { return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)}; }
inline Vec to_floats(Ints x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }

#if defined(BYTETX_NEON_I8MM) || defined(BYTETX_NEON_DOTPROD)

using Word = int8_t;

inline void store_words(Word* q, int64_t i, Ints numbers, int64_t room) {
    const int16x8_t words = vcombine_s16(vmovn_s32(numbers.low), vmovn_s32(numbers.high));
    const int8x8_t bytes = vmovn_s16(words);
    if (room >= Vec::kWidth) return vst1_s8(q + i, bytes);
    __builtin_memcpy(q + i, &bytes, 4);  // room is a multiple of 4
}

#else

using Word = int16_t;

inline void store_words(Word* q, int64_t i, Ints numbers, int64_t room) {
    vst1_s16(q + i, vmovn_s32(numbers.low));
    if (room >= Vec::kWidth) vst1_s16(q + i + 4, vmovn_s32(numbers.high));
}

#endif

#if defined(BYTETX_NEON_I8MM)

constexpr int32_t kWeightOffset = 128;

// An instruction multiplies 8 features of two outputs with those of two rows; of an odd number of
// rows the last one takes both places.
template <int kRows>
inline void multiply(const Word* q, const uint8_t* weight, int64_t padded,
                     int32_t (*sums)[kTileColumns]) {
    constexpr int kPairs = (kRows + 1) / 2, kVectors = kTileColumns / 4;
    int32x4_t both[kPairs][2 * kVectors];  // output 0 of row 0 and 1, output 1 of row 0 and 1
#pragma GCC unroll 3
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * kVectors; ++v) both[pair][v] = vdupq_n_s32(0);
    }
    const auto add = [&](auto load_weights, auto load_features) {
        int8x16_t features[kPairs];
#pragma GCC unroll 3
        for (int pair = 0; pair < kPairs; ++pair) {
            const Word* even = q + 2 * pair * padded;
            const Word* odd = 2 * pair + 1 < kRows ? even + padded : even;
            features[pair] = vcombine_s8(load_features(even), load_features(odd));
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const uint32x4x2_t outputs = load_weights(4 * kInt8Group * v);
#pragma GCC unroll 3
            for (int pair = 0; pair < kPairs; ++pair) {
                int32x4_t& low = both[pair][2 * v];
                int32x4_t& high = both[pair][2 * v + 1];
                low = vusmmlaq_s32(low, vreinterpretq_u8_u32(outputs.val[0]), features[pair]);
                high = vusmmlaq_s32(high, vreinterpretq_u8_u32(outputs.val[1]), features[pair]);
            }
        }
    };
    int64_t i = 0;
    for (; i + 2 * kInt8Group <= padded; i += 2 * kInt8Group) {
        const uint8_t* w = weight + i * kInt8Columns;
        add(
            [=](int at) {
                const uint8_t* next = w + kInt8Group * kInt8Columns;
                return vzipq_u32(vreinterpretq_u32_u8(vld1q_u8(w + at)),
                                 vreinterpretq_u32_u8(vld1q_u8(next + at)));
            },
            [=](const Word* row) { return vld1_s8(row + i); });
    }
    if (i < padded) {  // the last 4 features, with 4 zeros
        const uint8_t* w = weight + i * kInt8Columns;
        add(
            [=](int at) {
                return vzipq_u32(vreinterpretq_u32_u8(vld1q_u8(w + at)), vdupq_n_u32(0));
            },
            [=](const Word* row) {
                int32_t word;
                __builtin_memcpy(&word, row + i, sizeof(word));
                return vreinterpret_s8_s32(vset_lane_s32(word, vdup_n_s32(0), 0));
            });
    }
#pragma GCC unroll 3
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const int32x4x2_t rows = vuzpq_s32(both[pair][2 * v], both[pair][2 * v + 1]);
            vst1q_s32(sums[2 * pair] + 4 * v, rows.val[0]);
            if (2 * pair + 1 < kRows) vst1q_s32(sums[2 * pair + 1] + 4 * v, rows.val[1]);
        }
    }
}

#else

template <int kRows, int kVectors>
inline void store_sums(const int32x4_t (&own)[kRows][kVectors], int32_t (*sums)[kTileColumns]) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) vst1q_s32(sums[r] + 4 * v, own[r][v]);
    }
}

template <int kRows, int kVectors>
inline void clear_sums(int32x4_t (&own)[kRows][kVectors]) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) own[r][v] = vdupq_n_s32(0);
    }
}

#if defined(BYTETX_NEON_DOTPROD)

constexpr int32_t kWeightOffset = 0;  // both factors of the instruction are signed

template <int kRows>
inline void multiply(const Word* q, const uint8_t* weight, int64_t padded,
                     int32_t (*sums)[kTileColumns]) {
    constexpr int kVectors = kTileColumns / 4;
    int32x4_t own[kRows][kVectors];
    clear_sums(own);
    for (int64_t i = 0; i < padded; i += kInt8Group) {
        int8x16_t outputs[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const uint8x16_t w = vld1q_u8(weight + i * kInt8Columns + 16 * v);
            outputs[v] = vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(0x80)));
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            int32_t word;
            __builtin_memcpy(&word, q + r * padded + i, sizeof(word));
            const int8x16_t features = vreinterpretq_s8_s32(vdupq_n_s32(word));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                own[r][v] = vdotq_s32(own[r][v], outputs[v], features);
            }
        }
    }
    store_sums(own, sums);
}

#else

constexpr int32_t kWeightOffset = 128;

// Bytes are widened to 16 bits. A load takes the 4 features of 16 outputs apart.
template <int kRows>
inline void multiply(const Word* q, const uint8_t* weight, int64_t padded,
                     int32_t (*sums)[kTileColumns]) {
    int32x4_t own[kRows][kTileColumns / 4];
    clear_sums(own);
    for (int64_t i = 0; i < padded; i += kInt8Group) {
        const uint8x16x4_t features = vld4q_u8(weight + i * kInt8Columns);
#pragma GCC unroll 4
        for (int f = 0; f < kInt8Group; ++f) {
            const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(features.val[f])));
            const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(features.val[f])));
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r) {
                const int16_t x = q[r * padded + i + f];
                own[r][0] = vmlal_n_s16(own[r][0], vget_low_s16(low), x);
                own[r][1] = vmlal_n_s16(own[r][1], vget_high_s16(low), x);
                own[r][2] = vmlal_n_s16(own[r][2], vget_low_s16(high), x);
                own[r][3] = vmlal_n_s16(own[r][3], vget_high_s16(high), x);
            }
        }
    }
    store_sums(own, sums);
}

#endif
#endif

}  // namespace bytetx::cpu::BYTETX_SIMD
