// 4-lane f32 vectors on 64-bit ARM, and pairs of bf16 where it has them; names and meaning as in
// attention_simd_avx512.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {

// p[0, n), zeros behind them.
template <int kCount, typename T>
inline void copy_first(T (&lanes)[kCount], const T* p, int n) {
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
}

struct Neon {
    using Vec = float32x4_t;
    using Wide = Neon;  // one element a word, whatever its type
    static constexpr int kWidth = 4;
    static constexpr int kPair = 1;
    static constexpr int kExp2Degree = 6;
    static constexpr float kMinExponent = -127;  // scale_by_power() makes normal numbers and 0
    static constexpr int kScoreVectors = 4;      // 4 x 6 accumulators + 5 operands of 32 registers
    static constexpr int kScoreKeys = 6;
    static constexpr int kMaxValueVectors = 4;  // 8 x 3 or 4 x 4 accumulators
    static constexpr int value_rows(int num_vectors) { return num_vectors <= 3 ? 8 : 4; }

    static Vec zero() { return vdupq_n_f32(0.0f); }
    static Vec set1(float x) { return vdupq_n_f32(x); }
    // Rows of k and v where they lie, which may hold another type than float.
    template <typename Word>
    static Vec load_in_place(const Word* p) {
        return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p)));
    }
    static Vec load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, Vec x) { vst1q_f32(p, x); }
    static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
    static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
    static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
    static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
    // b where either is NaN, as on x86.
    static Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
    static Vec fms(Vec a, Vec b, Vec c) { return vfmaq_f32(vnegq_f32(c), a, b); }
    static Vec round(Vec x) { return vrndnq_f32(x); }
    static Vec scale_by_power(Vec x, Vec n) {  // n in [-127, 127]; 0 at -127
        const int32x4_t power = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
        return mul(x, vreinterpretq_f32_s32(vshlq_n_s32(power, 23)));
    }
    static Vec reverse(Vec x) {
        const Vec pairs = vrev64q_f32(x);
        return vextq_f32(pairs, pairs, 2);
    }

    static Vec dot(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    static void store_weights(float* p, int stride, Vec even, Vec odd) {
        store(p, even);
        store(p + stride, odd);
    }

    static Vec load_words(const float* row, int n) {
        if (n >= kWidth) return load(row);
        float lanes[kWidth] = {};
        copy_first(lanes, row, n);
        return load(lanes);
    }
    static Vec load_words(const uint16_t* row, int n) {
        return vreinterpretq_f32_u32(vshll_n_u16(load_quad(row, n), 16));
    }
    static Vec load_words(const uint8_t* row, int n) {
        uint8_t lanes[8] = {};
        if (n < 8) {
            copy_first(lanes, row, n);
            row = lanes;
        }
        const int16x4_t halves =
            vshl_n_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(row)))), 7);
        const uint16x4_t bits = vand_u16(vreinterpret_u16_s16(halves), vdup_n_u16(0xbfff));
        return vcvt_f32_f16(vreinterpret_f16_u16(bits));
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
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        const uint16x4_t rounded = vshrn_n_u32(vaddq_u32(bits, bias), 16);
        const uint16x4_t is_number = vmovn_u32(vceqq_f32(x, x));
        store_quad(row, vbsl_u16(is_number, rounded, vdup_n_u16(0x7fc0)), n);
    }

    static void transpose(Vec (&rows)[kWidth]) {
        const float32x4x2_t even = vzipq_f32(rows[0], rows[2]), odd = vzipq_f32(rows[1], rows[3]);
        const float32x4x2_t low = vzipq_f32(even.val[0], odd.val[0]);
        const float32x4x2_t high = vzipq_f32(even.val[1], odd.val[1]);
        rows[0] = low.val[0];
        rows[1] = low.val[1];
        rows[2] = high.val[0];
        rows[3] = high.val[1];
    }

  protected:
    static uint16x4_t load_quad(const uint16_t* p, int n) {
        if (n >= 4) return vld1_u16(p);
        uint16_t lanes[4] = {};
        copy_first(lanes, p, n);
        return vld1_u16(lanes);
    }
    static void store_quad(uint16_t* p, uint16x4_t x, int n) {
        if (n >= 4) return vst1_u16(p, x);
        uint16_t lanes[4];
        vst1_u16(lanes, x);
        for (int i = 0; i < n; ++i) p[i] = lanes[i];
    }
};

#if defined(BYTETX_NEON_BF16)
struct NeonBf16 : Neon {
    static constexpr int kPair = 2;
    static constexpr int kExp2Degree = 4;  // 3e-6 relative, against 2e-3 of the rounding to bf16

    static Vec dot(Vec acc, Vec a, Vec b) {
        return vbfdotq_f32(acc, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
    }
    // One row: word lane i = {even lane i, odd lane i}, rounded to bf16.
    static void store_weights(float* p, int, Vec even, Vec odd) {
        store(p, pairs(rounded(even), rounded(odd)));
    }
    static Vec load_words(const uint16_t* row, int n) {
        uint16_t lanes[2 * kWidth] = {};
        if (n < 2 * kWidth) {
            copy_first(lanes, row, n);
            row = lanes;
        }
        return vreinterpretq_f32_u16(vld1q_u16(row));
    }
    // Word lane i = {even row element i, odd row element i}; an absent odd row counts as zeros.
    static Vec load_word_rows(const uint16_t* even, const uint16_t* odd, int n) {
        return pairs(load_quad(even, n), odd == nullptr ? vdup_n_u16(0) : load_quad(odd, n));
    }
    static void store_row(uint16_t* row, Vec x, int n) { store_quad(row, rounded(x), n); }

  private:
    static uint16x4_t rounded(Vec x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
    static Vec pairs(uint16x4_t even, uint16x4_t odd) {
        const uint16x4x2_t zipped = vzip_u16(even, odd);
        return vreinterpretq_f32_u16(vcombine_u16(zipped.val[0], zipped.val[1]));
    }
};
#endif

}  // namespace
