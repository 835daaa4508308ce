// How codes of 8 and 4 bits lie in memory, and how registers of the matrix unit come of them.
//
// A block has four strips of 16 outputs, one for each warp of a warpgroup. A lane's codes are those
// that it needs as operand a of wgmma (common/wgmma.cuh), of outputs r0 = lane / 4 and r0 + 8. A
// quad q of eight features 2 * (lane % 4) + {0, 1, 8, 9, 16, 17, 24, 25} of 32 is one word of 4-bit
// codes, pair i in its nibbles i and i + 4, or two words of 8-bit codes.
//   4 bits: a strip is [32 lanes][4 words]: r0 and r0 + 8 of the first 32 features, then of the
//           others.
//   8 bits: a strip is [2 groups][32 lanes][4 words]: two words of r0, two of r0 + 8.
// Numbers: [strip][8 r0][4] of one or two: r0 and r0 + 8 of the first group, then of the other. A
// zero point is stored with the ones that a decoded code has: 1024 of f16, 128 of four bits of
// bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/element.cuh"
#include "grouped_ops.h"

namespace bytetx::grouped {

constexpr int kBlockOutputs = 64, kBlockFeatures = 64;
constexpr int kStripOutputs = 16;
constexpr int kGroup = 32;  // features that share a scale

// How codes are decoded; what is known as kernels are compiled costs no instruction in them. An
// enum and no struct: nvcc's host code of a kernel cannot name values of a struct. four_bits: with
// least values, four_bits_zero: with zero points.  eight_bits_pair: with two numbers a group, of
// which GroupForm says as a kernel runs what they are.
enum class CodeKind : int { four_bits, four_bits_zero, eight_bits, eight_bits_pair };
constexpr CodeKind kFourBits = CodeKind::four_bits, kFourBitsZero = CodeKind::four_bits_zero;
constexpr CodeKind kEightBits = CodeKind::eight_bits, kEightBitsPair = CodeKind::eight_bits_pair;

__host__ __device__ constexpr bool has_zero_points(CodeKind kind) { return kind == kFourBitsZero; }

__host__ __device__ constexpr int bits_of(CodeKind kind) {
    return kind == kFourBits || has_zero_points(kind) ? 4 : 8;
}

// Numbers that a group has.
__host__ __device__ constexpr int numbers_of(CodeKind kind) { return kind == kEightBits ? 1 : 2; }

// Arithmetic of pairs of 16-bit numbers, as words.
template <typename T>
struct Pairs;

template <>
struct Pairs<Half> {
    using Pair = __half2;
    static constexpr uint32_t kMagic = 0x64006400;  // 1024, whose last bits count ones
    static __device__ __forceinline__ Pair both(__half x) { return __half2half2(x); }
    // Two bytes of codes, less 128, times a scale.
    static __device__ __forceinline__ Pair scaled(uint32_t bytes, int i, Pair scale) {
        const uint32_t word = __byte_perm(bytes, kMagic, i % 2 == 0 ? 0x5150 : 0x5352);
        return __hmul2(__hsub2(reinterpret_cast<const Pair&>(word), both(__half(1152.0f))), scale);
    }
};

template <>
struct Pairs<BFloat16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t kMagic = 0x43004300;  // 128
    static __device__ __forceinline__ Pair both(__nv_bfloat16 x) { return __bfloat162bfloat162(x); }
    static __device__ __forceinline__ Pair scaled(uint32_t bytes, int i, Pair scale) {
        const float factor = __bfloat162float(scale.x);
        const auto number = [&](uint32_t byte) {  // 2^23 counts ones
            return __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 | byte)) - 8388736.0f;
        };
        const uint32_t low = i % 2 * 2;
        return __floats2bfloat162_rn(number(low) * factor, number(low + 1) * factor);
    }
};

// (x & mask) | bits, in one instruction.
__device__ __forceinline__ uint32_t masked(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

// Pair i of a word of eight 4-bit codes. number: scale and least value, or scale and zero point
// with the ones that codes have.
template <typename T, bool kHasZero>
__device__ __forceinline__ uint32_t weights_of4(uint32_t codes, int i, uint32_t number) {
    using P = Pairs<T>;
    using Pair = typename P::Pair;
    const uint32_t word = masked(codes >> 4 * i, 0x000f000f, P::kMagic), magic = P::kMagic;
    const Pair numbers = reinterpret_cast<const Pair&>(number);
    const Pair code = reinterpret_cast<const Pair&>(word);
    Pair weights;
    if constexpr (kHasZero) {
        weights = __hmul2(__hsub2(code, P::both(numbers.y)), P::both(numbers.x));
    } else {
        const Pair pair = __hsub2(code, reinterpret_cast<const Pair&>(magic));
        weights = __hfma2(pair, P::both(numbers.x), P::both(numbers.y));
    }
    return reinterpret_cast<const uint32_t&>(weights);
}

// Numbers of a group of 8-bit codes that has two of them; each scale is for 16 features.
template <typename T>
struct Numbers8;

template <>
struct Numbers8<Half> {
    __half scales[2], ones, least;

    static __device__ __forceinline__ Numbers8 of(uint32_t number, GroupForm form) {
        const __half2 both = reinterpret_cast<const __half2&>(number);
        const __half zero = __half(0.0f);
        if (form == GroupForm::halves) return {{both.x, both.y}, __half(1152.0f), zero};
        if (form == GroupForm::zero) return {{both.x, both.x}, both.y, zero};
        return {{both.x, both.x}, __half(1024.0f), both.y};
    }

    __device__ __forceinline__ uint32_t weights(uint32_t bytes, int i) const {
        using P = Pairs<Half>;
        const uint32_t word = __byte_perm(bytes, P::kMagic, i % 2 == 0 ? 0x5150 : 0x5352);
        const __half2 pair = __hsub2(reinterpret_cast<const __half2&>(word), P::both(ones));
        const __half2 found = __hfma2(pair, P::both(scales[i / 2]), P::both(least));
        return reinterpret_cast<const uint32_t&>(found);
    }
};

template <>
struct Numbers8<BFloat16> {
    float scales[2], ones, least;

    static __device__ __forceinline__ Numbers8 of(uint32_t number, GroupForm form) {
        const float low = __uint_as_float(number << 16);
        const float high = __uint_as_float(number & 0xffff0000);
        constexpr float kOnes = 8388608.0f;  // 2^23
        if (form == GroupForm::halves) return {{low, high}, kOnes + 128.0f, 0.0f};
        if (form == GroupForm::zero) return {{low, low}, kOnes + high, 0.0f};
        return {{low, low}, kOnes, high};
    }

    __device__ __forceinline__ uint32_t weights(uint32_t bytes, int i) const {
        const auto number = [&](uint32_t byte) {
            const float code = __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 | byte));
            return fmaf(code - ones, scales[i / 2], least);
        };
        const uint32_t low = i % 2 * 2;
        const __nv_bfloat162 found = __floats2bfloat162_rn(number(low), number(low + 1));
        return reinterpret_cast<const uint32_t&>(found);
    }
};

// Pair i % 2 of a word of four 8-bit codes. scales: of two outputs, the second where is_second.
template <typename T>
__device__ __forceinline__ uint32_t weights_of8(uint32_t codes, int i, uint32_t scales,
                                                bool is_second) {
    using P = Pairs<T>;
    using Pair = typename P::Pair;
    const Pair both = reinterpret_cast<const Pair&>(scales);
    const Pair weights = P::scaled(codes, i, P::both(is_second ? both.y : both.x));
    return reinterpret_cast<const uint32_t&>(weights);
}

template <CodeKind kKind>
struct Codes {
    static constexpr int kBits = bits_of(kKind);
    static constexpr int kStripBytes = kStripOutputs * kBlockFeatures * kBits / 8;
    static constexpr int kNumberBytes = numbers_of(kKind) * 2;
    static constexpr int kStripNumberBytes = kStripOutputs * 2 * kNumberBytes;  // two groups
    static constexpr int kStrips = kBlockOutputs / kStripOutputs;
    static constexpr int kNumbersAt = kStrips * kStripBytes;
    static constexpr int kBytes = kNumbersAt + kStrips * kStripNumberBytes;
};

// Operand a of the four products of a strip: a[4 * j + i] of features 16 * j on.
template <typename T, CodeKind kKind>
__device__ __forceinline__ void weights_of_strip(const uint8_t* strip_codes,
                                                 const uint8_t* strip_numbers, int lane,
                                                 GroupForm form, uint32_t (&a)[16]) {
    using C = Codes<kKind>;
    const auto* codes = reinterpret_cast<const uint4*>(strip_codes) + lane;
    const uint8_t* numbers = strip_numbers + lane / 4 * 4 * C::kNumberBytes;
    // Pairs 0 and 1 are features 0 and 8 of the first product, 2 and 3 of the next.
    const auto place = [](int i) { return i / 2 * 4 + i % 2 * 2; };
    if constexpr (bits_of(kKind) == 4) {
        constexpr bool kHasZero = has_zero_points(kKind);
        const uint4 words = *codes;
        const uint4 scales = *reinterpret_cast<const uint4*>(numbers);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[place(i)] = weights_of4<T, kHasZero>(words.x, i, scales.x);
            a[place(i) + 1] = weights_of4<T, kHasZero>(words.y, i, scales.y);
            a[8 + place(i)] = weights_of4<T, kHasZero>(words.z, i, scales.z);
            a[8 + place(i) + 1] = weights_of4<T, kHasZero>(words.w, i, scales.w);
        }
    } else if constexpr (numbers_of(kKind) == 2) {
        const uint4 scales = *reinterpret_cast<const uint4*>(numbers);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const uint4 words = codes[32 * group];
            const auto first = Numbers8<T>::of(group == 0 ? scales.x : scales.z, form);
            const auto second = Numbers8<T>::of(group == 0 ? scales.y : scales.w, form);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[group * 8 + place(i)] = first.weights(i < 2 ? words.x : words.y, i);
                a[group * 8 + place(i) + 1] = second.weights(i < 2 ? words.z : words.w, i);
            }
        }
    } else {
        const uint2 scales = *reinterpret_cast<const uint2*>(numbers);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const uint4 words = codes[32 * group];
            const uint32_t both = group == 0 ? scales.x : scales.y;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int to = group * 8 + place(i);
                a[to] = weights_of8<T>(i < 2 ? words.x : words.y, i, both, false);
                a[to + 1] = weights_of8<T>(i < 2 ? words.z : words.w, i, both, true);
            }
        }
    }
}

// The same of one of a block's strips.
template <typename T, CodeKind kKind>
__device__ __forceinline__ void weights_of_block(const uint8_t* block, int strip, int lane,
                                                 GroupForm form, uint32_t (&a)[16]) {
    using C = Codes<kKind>;
    weights_of_strip<T, kKind>(block + strip * C::kStripBytes,
                               block + C::kNumbersAt + strip * C::kStripNumberBytes, lane, form, a);
}

// Calls body with the kind of codes of these bits and this form.
template <typename Body>
void dispatch_kind(int bits, GroupForm form, Body&& body) {
    if (bits == 4 && form == GroupForm::zero) return body.template operator()<kFourBitsZero>();
    if (bits == 4) return body.template operator()<kFourBits>();
    if (form == GroupForm::symmetric) return body.template operator()<kEightBits>();
    body.template operator()<kEightBitsPair>();
}

}  // namespace bytetx::grouped
