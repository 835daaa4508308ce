// 32-bit words of 8 outputs, each output's own behind one another, to those of each step together.
#pragma once

#include "cpu/simd.h"

namespace bytetx::cpu::BYTETX_SIMD {

// to[word][output] = from[output][word] for 8 words of 8 outputs. from_bytes: from output to
// output, of any alignment; to_words: from word to word.
inline void transpose_words(const void* from, int64_t from_bytes, uint32_t* to, int64_t to_words) {
    const auto* bytes = static_cast<const char*>(from);
#if defined(BYTETX_NEON)
    const auto load_words = [=](int output, int word) {
        return vreinterpretq_u32_u8(vld1q_u8(
            reinterpret_cast<const uint8_t*>(bytes + output * from_bytes + word * int64_t{4})));
    };
    for (int output = 0; output < 8; output += 4) {
        for (int word = 0; word < 8; word += 4) {
            const uint32x4_t a = load_words(output, word), b = load_words(output + 1, word);
            const uint32x4_t c = load_words(output + 2, word), d = load_words(output + 3, word);
            const uint32x4x2_t even = vzipq_u32(a, c), odd = vzipq_u32(b, d);
            const uint32x4x2_t low = vzipq_u32(even.val[0], odd.val[0]);
            const uint32x4x2_t high = vzipq_u32(even.val[1], odd.val[1]);
            uint32_t* block = to + word * to_words + output;
            vst1q_u32(block, low.val[0]);
            vst1q_u32(block + to_words, low.val[1]);
            vst1q_u32(block + 2 * to_words, high.val[0]);
            vst1q_u32(block + 3 * to_words, high.val[1]);
        }
    }
#else
    const auto load_half = [=](int output, int word) {
        return _mm_loadu_ps(
            reinterpret_cast<const float*>(bytes + output * from_bytes + word * int64_t{4}));
    };
    // Halves of outputs i and i + 4 share a register from the load on: no shuffle crosses lanes.
#pragma GCC unroll 2
    for (int word = 0; word < 8; word += 4) {
        __m256 rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            rows[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(load_half(i, word)),
                                           load_half(i + 4, word), 1);
        }
        const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]);
        const __m256 b = _mm256_unpackhi_ps(rows[0], rows[1]);
        const __m256 c = _mm256_unpacklo_ps(rows[2], rows[3]);
        const __m256 d = _mm256_unpackhi_ps(rows[2], rows[3]);
        auto* block = reinterpret_cast<float*>(to + word * to_words);
        _mm256_storeu_ps(block, _mm256_shuffle_ps(a, c, 0x44));
        _mm256_storeu_ps(block + to_words, _mm256_shuffle_ps(a, c, 0xee));
        _mm256_storeu_ps(block + 2 * to_words, _mm256_shuffle_ps(b, d, 0x44));
        _mm256_storeu_ps(block + 3 * to_words, _mm256_shuffle_ps(b, d, 0xee));
    }
#endif
}

}  // namespace bytetx::cpu::BYTETX_SIMD
