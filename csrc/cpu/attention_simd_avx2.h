// 8-lane f32 vectors on AVX2 + FMA; names and meaning as in attention_simd_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Avx2 {
    using Vec = __m256;
    using Wide = Avx2;  // one element a word, whatever its type
    static constexpr int kWidth = 8;
    static constexpr int kPair = 1;
    static constexpr int kExp2Degree = 6;
    static constexpr float kMinExponent = -127;  // scale_by_power() makes normal numbers and 0
    static constexpr int kScoreVectors = 2;      // 2 x 6 accumulators + 3 operands of 16 registers
    static constexpr int kScoreKeys = 6;
    static constexpr int kMaxValueVectors = 3;  // 4 x 3 accumulators + 4 operands
    static constexpr int value_rows(int) { return 4; }

    static Vec zero() { return _mm256_setzero_ps(); }
    static Vec set1(float x) { return _mm256_set1_ps(x); }
    // Rows of k and v where they lie, which may hold another type than float.
    template <typename Word>
    static Vec load_in_place(const Word* p) {
        return load(reinterpret_cast<const float*>(p));
    }
    static Vec load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
    static Vec round(Vec x) {
        return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static Vec scale_by_power(Vec x, Vec n) {  // n in [-127, 127]; 0 at -127
        const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
    }
    static Vec reverse(Vec x) {
        return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    }

    static Vec dot(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    static void store_weights(float* p, int stride, Vec even, Vec odd) {
        store(p, even);
        store(p + stride, odd);
    }

    static Vec load_words(const float* row, int n) {
        if (n >= kWidth) return load(row);
        float lanes[kWidth] = {};
        for (int i = 0; i < n; ++i) lanes[i] = row[i];
        return load(lanes);
    }
    static Vec load_words(const uint16_t* row, int n) {
        uint16_t lanes[kWidth] = {};
        if (n < kWidth) {
            for (int i = 0; i < n; ++i) lanes[i] = row[i];
            row = lanes;
        }
        const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)row));
        return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    }
    static Vec load_words(const uint8_t* row, int n) {
        uint8_t lanes[kWidth] = {};
        if (n < kWidth) {
            for (int i = 0; i < n; ++i) lanes[i] = row[i];
            row = lanes;
        }
        const __m128i halves =
            _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)row)), 7);
        return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(~0x4000)));
    }
    template <typename T>
    static Vec load_word_rows(const T* even, const T*, int n) {
        return load_words(even, n);
    }

    static void store_row(float* row, Vec x, int n) {
        if (n >= kWidth) return store(row, x);
        float lanes[kWidth];
        store(lanes, x);
        for (int i = 0; i < n; ++i) row[i] = lanes[i];
    }
    static void store_row(uint16_t* row, Vec x, int n) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i safe = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
        const __m128i halves =
            _mm_packus_epi32(_mm256_castsi256_si128(safe), _mm256_extracti128_si256(safe, 1));
        if (n >= kWidth) return _mm_storeu_si128((__m128i*)row, halves);
        uint16_t lanes[kWidth];
        _mm_storeu_si128((__m128i*)lanes, halves);
        for (int i = 0; i < n; ++i) row[i] = lanes[i];
    }

    static void transpose(Vec (&rows)[kWidth]) {
        Vec t[kWidth];
#pragma GCC unroll 2
        for (int i = 0; i < kWidth; i += 4) {
            const Vec a = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
            const Vec b = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
            const Vec c = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
            const Vec d = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
            t[i] = _mm256_shuffle_ps(a, c, 0x44);
            t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
            t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
            t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            rows[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
            rows[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
        }
    }
};

}  // namespace
