// 16-lane f32 vectors on AVX-512 (F, BW, DQ, VL), and bf16 pairs on AVX-512 BF16, for kernels that
// are templates over their instruction set.  attention_simd_avx2.h and attention_simd_portable.h
// offer the same names.
//
// A "word" is 32 bits of packed operand: one f32, or (Avx512Bf16) two bf16 that dot() multiplies
// and adds into one f32 lane.  Words travel as f32 vectors whatever their bits mean.
//
// Everything is in an anonymous namespace: each object file keeps its own copy, so the linker can
// never let a processor without AVX-512 run a copy that was compiled with it.
#pragma once

// gcc 12 warns of its own placeholders for lanes that no instruction reads (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

namespace {

struct Avx512 {
    using Vec = __m512;
    using Wide = Avx512;                      // one element a word, whatever its type
    static constexpr int kWidth = 16;         // f32 lanes
    static constexpr int kPair = 1;           // elements in a word
    static constexpr int kExp2Degree = 6;     // 1 ulp, see exp2() in attention_kernel.h
    static constexpr float kMinExponent = 0;  // scale_by_power() needs no bound
    static constexpr int kScoreVectors = 2;   // 2 x 12 accumulators + 2 operands of 32 registers
    static constexpr int kScoreKeys = 12;
    static constexpr int kMaxValueVectors = 4;  // 8 x 3 or 4 x 4 accumulators
    static constexpr int value_rows(int num_vectors) { return num_vectors <= 3 ? 8 : 4; }

    static Vec zero() { return _mm512_setzero_ps(); }
    static Vec set1(float x) { return _mm512_set1_ps(x); }
    // Rows of k and v where they lie, which may hold another type than float.
    template <typename Word>
    static Vec load_in_place(const Word* p) {
        return load(reinterpret_cast<const float*>(p));
    }
    static Vec load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
    static Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }  // a * b - c
    static Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
    // x * 2^n for integral n; underflows to 0, keeps NaN.
    static Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
    static Vec reverse(Vec x) {
        const __m512i order =
            _mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_permutexvar_ps(order, x);
    }

    // acc + a . b, word by word.
    static Vec dot(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    // The weights of two neighbouring keys as rows of words, `stride` words apart.
    static void store_weights(float* p, int stride, Vec even, Vec odd) {
        store(p, even);
        store(p + stride, odd);
    }

    // The first n elements of a row as words, zeros behind them; reads nothing past element n.
    static Vec load_words(const float* row, int n) {
        return n >= kWidth ? load(row) : _mm512_maskz_loadu_ps((1u << n) - 1, row);
    }
    static Vec load_words(const uint16_t* row, int n) {
        const __m256i bits = n >= kWidth ? _mm256_loadu_si256((const __m256i*)row)
                                         : _mm256_maskz_loadu_epi16((1u << n) - 1, row);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    // E4M3 codes, 2^8 times too small: in f16 they have one bit more of exponent, for zeros.
    static Vec load_words(const uint8_t* row, int n) {
        const __m128i codes = n >= kWidth ? _mm_loadu_si128((const __m128i*)row)
                                          : _mm_maskz_loadu_epi8((1u << n) - 1, row);
        const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(~0x4000)));
    }
    template <typename T>
    static Vec load_word_rows(const T* even, const T*, int n) {
        return load_words(even, n);
    }

    // Rounds lanes 0..n-1 to the row's type, to nearest even.
    static void store_row(float* row, Vec x, int n) {
        _mm512_mask_storeu_ps(row, n >= kWidth ? 0xffff : (1u << n) - 1, x);
    }
    static void store_row(uint16_t* row, Vec x, int n) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i safe = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
        _mm512_mask_cvtepi32_storeu_epi16(row, n >= kWidth ? 0xffff : (1u << n) - 1, safe);
    }

    // rows[i] lane j <-> rows[j] lane i.
    static void transpose(Vec (&rows)[kWidth]) {
        Vec t[kWidth];
#pragma GCC unroll 4
        for (int i = 0; i < kWidth; i += 4) {
            const Vec a = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
            const Vec b = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
            const Vec c = _mm512_unpacklo_ps(rows[i + 2], rows[i + 3]);
            const Vec d = _mm512_unpackhi_ps(rows[i + 2], rows[i + 3]);
            t[i] = unpack_low(a, c);
            t[i + 1] = unpack_high(a, c);
            t[i + 2] = unpack_low(b, d);
            t[i + 3] = unpack_high(b, d);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const Vec a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
            const Vec b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
            const Vec c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
            const Vec d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
            rows[i] = _mm512_shuffle_f32x4(a, c, 0x88);
            rows[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
            rows[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
            rows[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
        }
    }

  private:
    static Vec unpack_low(Vec a, Vec b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
    static Vec unpack_high(Vec a, Vec b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
};

#if defined(__AVX512BF16__)
struct Avx512Bf16 : Avx512 {
    static constexpr int kPair = 2;
    static constexpr int kExp2Degree = 4;  // 3e-6 relative, against 2e-3 of the rounding to bf16

    static Vec dot(Vec acc, Vec a, Vec b) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_castps_si512(a),
                                (__m512bh)_mm512_castps_si512(b));
    }
    // One row: word lane i = {even lane i, odd lane i}, rounded to bf16.
    static void store_weights(float* p, int, Vec even, Vec odd) {
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        const __m512i order =
            _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                             22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        store(p, _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves)));
    }
    static Vec load_words(const uint16_t* row, int n) {
        const __m512i bits = n >= 2 * kWidth ? _mm512_loadu_si512(row)
                                             : _mm512_maskz_loadu_epi16((1u << n) - 1, row);
        return _mm512_castsi512_ps(bits);
    }
    // Word lane i = {even row element i, odd row element i}; an absent odd row counts as zeros.
    static Vec load_word_rows(const uint16_t* even, const uint16_t* odd, int n) {
        const __mmask16 mask = n >= kWidth ? 0xffff : (1u << n) - 1;
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even));
        if (odd == nullptr) return _mm512_castsi512_ps(low);
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd));
        return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    static void store_row(uint16_t* row, Vec x, int n) {
        const __mmask16 mask = n >= kWidth ? 0xffff : (1u << n) - 1;
        _mm256_mask_storeu_epi16(row, mask, (__m256i)_mm512_cvtneps_pbh(x));
    }
};
#endif

}  // namespace
