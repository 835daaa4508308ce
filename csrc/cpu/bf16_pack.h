// Plain weights of bf16 as the panels that kernels read.
#pragma once

#include "cpu/bf16_linear.h"
#include "cpu/simd.h"

namespace bytetx::cpu::BYTETX_SIMD {

// to[8 pairs][8 of a panel's outputs] = from[8 outputs][8 pairs]; `stride` in features.
inline void transpose_words(const Bf16* from, int64_t stride, uint32_t* to) {
#if defined(BYTETX_NEON)
    const auto load_pairs = [=](int output, int pair) {
        return vreinterpretq_u32_u16(vld1q_u16(&from[output * stride + 2 * pair].bits));
    };
    for (int output = 0; output < 8; output += 4) {
        for (int pair = 0; pair < 8; pair += 4) {
            const uint32x4_t a = load_pairs(output, pair), b = load_pairs(output + 1, pair);
            const uint32x4_t c = load_pairs(output + 2, pair), d = load_pairs(output + 3, pair);
            const uint32x4x2_t even = vzipq_u32(a, c), odd = vzipq_u32(b, d);
            const uint32x4x2_t low = vzipq_u32(even.val[0], odd.val[0]);
            const uint32x4x2_t high = vzipq_u32(even.val[1], odd.val[1]);
            uint32_t* block = to + pair * kBf16Columns + output;
            vst1q_u32(block, low.val[0]);
            vst1q_u32(block + kBf16Columns, low.val[1]);
            vst1q_u32(block + 2 * kBf16Columns, high.val[0]);
            vst1q_u32(block + 3 * kBf16Columns, high.val[1]);
        }
    }
#else
    __m256 rows[8], halves[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        rows[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * stride));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        halves[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        halves[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        rows[i] = _mm256_shuffle_ps(halves[i], halves[i + 2], 0x44);
        rows[i + 1] = _mm256_shuffle_ps(halves[i], halves[i + 2], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(halves[i + 1], halves[i + 3], 0x44);
        rows[i + 3] = _mm256_shuffle_ps(halves[i + 1], halves[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        auto* low = reinterpret_cast<float*>(to + i * kBf16Columns);
        auto* high = reinterpret_cast<float*>(to + (i + 4) * kBf16Columns);
        _mm256_storeu_ps(low, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
        _mm256_storeu_ps(high, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
    }
#endif
}

// Columns [first, first + 32) of plain weights as a packed panel; those from n on are zeros.
inline void pack_panel(const Bf16LinearParams& p, int64_t first, uint32_t* panel) {
    const int64_t num_pairs = feature_pairs(p.k), whole = p.k / 16 * 8;
    for (int64_t column = 0; column < kBf16Columns; column += 8) {
        const Bf16* weight = static_cast<const Bf16*>(p.weight) + (first + column) * p.k;
        const int64_t num_columns = p.n - first - column;
        int64_t pair = 0;
        for (; num_columns >= 8 && pair < whole; pair += 8) {
            transpose_words(weight + 2 * pair, p.k, panel + pair * kBf16Columns + column);
        }
        for (; pair < num_pairs; ++pair) {
            for (int64_t i = 0; i < 8; ++i) {
                const Bf16* w = weight + i * p.k + 2 * pair;
                uint32_t word = i < num_columns ? w[0].bits : 0;
                if (i < num_columns && 2 * pair + 1 < p.k) word |= uint32_t{w[1].bits} << 16;
                panel[pair * kBf16Columns + column + i] = word;
            }
        }
    }
}

// Panel `at`; plain weights are packed into `panel`.
inline const uint32_t* panel_of(const Bf16LinearParams& p, int64_t at, uint32_t* panel) {
    if (p.is_packed) return static_cast<const uint32_t*>(p.weight) + at * panel_words(p.k);
    pack_panel(p, at * kBf16Columns, panel);
    return panel;
}

}  // namespace bytetx::cpu::BYTETX_SIMD
