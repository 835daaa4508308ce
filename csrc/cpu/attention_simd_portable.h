// 4-lane f32 vectors in the GNU vector extension (gcc and clang, any processor: SSE2, NEON, ...);
// names and meaning as in attention_simd_avx512.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct Portable {
    typedef float Vec __attribute__((vector_size(16)));
    typedef int32_t IntVec __attribute__((vector_size(16)));
    using Wide = Portable;  // one element a word, whatever its type
    static constexpr int kWidth = 4;
    static constexpr int kPair = 1;
    static constexpr int kExp2Degree = 6;
    static constexpr float kMinExponent = -127;  // scale_by_power() makes normal numbers and 0
    static constexpr int kScoreVectors = 2;  // 2 x 4 accumulators; SSE2 needs a register a product
    static constexpr int kScoreKeys = 4;
    static constexpr int kMaxValueVectors = 2;
    static constexpr int value_rows(int) { return 4; }

    static Vec zero() { return Vec{}; }
    static Vec set1(float x) { return Vec{x, x, x, x}; }
    // Rows of k and v where they lie, which may hold another type than float.
    template <typename Word>
    static Vec load_in_place(const Word* p) {
        return load(reinterpret_cast<const float*>(p));
    }
    static Vec load(const float* p) {
        Vec x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec sub(Vec a, Vec b) { return a - b; }
    static Vec mul(Vec a, Vec b) { return a * b; }
    static Vec div(Vec a, Vec b) { return a / b; }
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN, as on x86
    static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }
    static Vec round(Vec x) {  // to nearest even, |x| < 2^22: the sum has no fraction bits
        const Vec magic = set1(12582912.0f);  // 1.5 * 2^23
        return (x + magic) - magic;
    }
    static Vec scale_by_power(Vec x, Vec n) {  // n in [-127, 127]; 0 at -127
        const IntVec power = __builtin_convertvector(n, IntVec) + 127;
        return x * (Vec)(power << 23);
    }
    static Vec reverse(Vec x) { return Vec{x[3], x[2], x[1], x[0]}; }

    static Vec dot(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    static void store_weights(float* p, int stride, Vec even, Vec odd) {
        store(p, even);
        store(p + stride, odd);
    }

    static Vec load_words(const float* row, int n) {
        if (n >= kWidth) return load(row);
        Vec x = zero();
        for (int i = 0; i < n; ++i) x[i] = row[i];
        return x;
    }
    static Vec load_words(const uint16_t* row, int n) {
        uint32_t bits[kWidth] = {};
        for (int i = 0; i < (n < kWidth ? n : kWidth); ++i) bits[i] = uint32_t{row[i]} << 16;
        Vec x;
        std::memcpy(&x, bits, sizeof x);
        return x;
    }
    static Vec load_words(const uint8_t* row, int n) {
        uint32_t bits[kWidth] = {};
        for (int i = 0; i < (n < kWidth ? n : kWidth); ++i) {
            bits[i] = (row[i] & 0x80u) << 24 | (row[i] & 0x7fu) << 20;
        }
        Vec x;
        std::memcpy(&x, bits, sizeof x);
        return x * set1(0x1p112f);
    }
    template <typename T>
    static Vec load_word_rows(const T* even, const T*, int n) {
        return load_words(even, n);
    }

    static void store_row(float* row, Vec x, int n) {
        for (int i = 0; i < (n < kWidth ? n : kWidth); ++i) row[i] = x[i];
    }
    static void store_row(uint16_t* row, Vec x, int n) {
        uint32_t bits[kWidth];
        std::memcpy(bits, &x, sizeof x);
        for (int i = 0; i < (n < kWidth ? n : kWidth); ++i) {
            const bool is_nan = (bits[i] & 0x7fffffff) > 0x7f800000;
            const uint32_t rounded = (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16;
            row[i] = static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded);
        }
    }

    static void transpose(Vec (&rows)[kWidth]) {
        for (int i = 0; i < kWidth; ++i) {
            for (int j = 0; j < i; ++j) {
                const float x = rows[i][j];
                rows[i][j] = rows[j][i];
                rows[j][i] = x;
            }
        }
    }
};

}  // namespace
