// Sums of products of some rows with some outputs of a panel, in vectors of outputs.
//
// A format says what a word of a panel and of a row holds. A step reads one word of each output,
// and as many features of every row as it stands for; a row's words are 32 bits, f32 or a pair of
// bf16. All of k, or each `chain` of it, is one chain of f32 sums, so that a result depends on
// nothing but its own row and output.
#pragma once

#include "cpu/simd_math.h"

namespace bytetx::cpu::BYTETX_SIMD {

#if defined(__AVX512F__)
using WordVec = __m512i;
inline WordVec load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Vec even_of(WordVec w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))}; }
inline Vec odd_of(WordVec w) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(w, high))};
}
inline Vec whole_of(WordVec w) { return {_mm512_castsi512_ps(w)}; }
#elif defined(BYTETX_NEON)
struct WordVec {
    uint32x4_t low, high;
};
inline WordVec load_words(const uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4)}; }
inline Vec whole_of(WordVec w) {
    return {vreinterpretq_f32_u32(w.low), vreinterpretq_f32_u32(w.high)};
}
inline Vec even_of(WordVec w) {
    return whole_of({vshlq_n_u32(w.low, 16), vshlq_n_u32(w.high, 16)});
}
inline Vec odd_of(WordVec w) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    return whole_of({vandq_u32(w.low, high), vandq_u32(w.high, high)});
}
#else
using WordVec = __m256i;
inline WordVec load_words(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Vec even_of(WordVec w) { return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16))}; }
inline Vec odd_of(WordVec w) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(w, high))};
}
inline Vec whole_of(WordVec w) { return {_mm256_castsi256_ps(w)}; }
#endif

// kRowWords: words of a row for one of the weight. add: sums[r][v] += those of one step.
struct F32Words {
    static constexpr int kFeatures = 1;
    static constexpr int kRowWords = 1;

    template <int kRows, int kVectors>
    static inline void add(Vec (&sums)[kRows][kVectors], const WordVec (&weight)[kVectors],
                           const float* rows, int64_t stride) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const Vec feature = broadcast(rows[r * stride]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                sums[r][v] = multiply_add(whole_of(weight[v]), feature, sums[r][v]);
            }
        }
    }
};

// A word is two neighbouring features, which a shift and a mask take apart; rows are f32.
struct Bf16Words {
    static constexpr int kFeatures = 2;
    static constexpr int kRowWords = 2;

    template <int kRows, int kVectors>
    static inline void add(Vec (&sums)[kRows][kVectors], const WordVec (&weight)[kVectors],
                           const float* rows, int64_t stride) {
        Vec half[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) half[v] = even_of(weight[v]);
        add_half<kRows, kVectors>(sums, half, rows, stride);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) half[v] = odd_of(weight[v]);
        add_half<kRows, kVectors>(sums, half, rows + 1, stride);
    }

  private:
    template <int kRows, int kVectors>
    static inline void add_half(Vec (&sums)[kRows][kVectors], const Vec (&half)[kVectors],
                                const float* rows, int64_t stride) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const Vec feature = broadcast(rows[r * stride]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                sums[r][v] = multiply_add(half[v], feature, sums[r][v]);
            }
        }
    }
};

#if defined(BYTETX_BF16_DOT)
#if defined(BYTETX_NEON)
inline Vec add_pairs(Vec sum, WordVec weight, float pair) {
    const bfloat16x8_t both = vreinterpretq_bf16_f32(vdupq_n_f32(pair));
    return {vbfdotq_f32(sum.low, vreinterpretq_bf16_u32(weight.low), both),
            vbfdotq_f32(sum.high, vreinterpretq_bf16_u32(weight.high), both)};
}
#else
inline Vec add_pairs(Vec sum, WordVec weight, float pair) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_ps(pair), (__m512bh)weight)};
}
#endif

// The same with the processor's own sum of two products; rows are bf16, too.
struct Bf16DotWords {
    static constexpr int kFeatures = 2;
    static constexpr int kRowWords = 1;

    template <int kRows, int kVectors>
    static inline void add(Vec (&sums)[kRows][kVectors], const WordVec (&weight)[kVectors],
                           const float* rows, int64_t stride) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const float pair = rows[r * stride];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                sums[r][v] = add_pairs(sums[r][v], weight[v], pair);
            }
        }
    }
};
#endif

// sums[r][column] of kVectors vectors of outputs, `sums_stride` words from row to row: a chain over
// num_steps steps that starts, or continues the one that sums has.  rows: `stride` words each.
// weight: of the first step, `step` words from one to the next; those that lie `ahead` words behind
// are fetched into L1.
template <class Format, int kRows, int kVectors>
[[gnu::noinline]] inline void sum_tile(const float* rows, int64_t stride, const uint32_t* weight,
                                       int64_t step, int64_t num_steps, int64_t ahead, bool starts,
                                       float* sums, int64_t sums_stride) {
    Vec acc[kRows][kVectors];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            acc[r][v] = starts ? broadcast(0.0f) : load(sums + r * sums_stride + v * Vec::kWidth);
        }
    }
#pragma GCC unroll 1
    for (int64_t at = 0; at < num_steps; ++at, weight += step, rows += Format::kRowWords) {
        WordVec words[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors * Vec::kWidth; i += 16) __builtin_prefetch(weight + ahead + i);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) words[v] = load_words(weight + v * Vec::kWidth);
        Format::template add<kRows, kVectors>(acc, words, rows, stride);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            store(sums + r * sums_stride + v * Vec::kWidth, acc[r][v]);
        }
    }
}

}  // namespace bytetx::cpu::BYTETX_SIMD
