// How codes of 8 and 4 bits lie in memory, and how registers of the matrix unit come of them.
//
// A block has four strips of 16 outputs, one for each warp of a warpgroup. A lane's codes are those
// that it needs as operand a of wgmma (common/wgmma.cuh), of outputs r0 = lane / 4 and r0 + 8. A
// quad q of eight features 2 * (lane % 4) + {0, 1, 8, 9, 16, 17, 24, 25} of 32 is one word of 4-bit
// codes, pair i in its nibbles i and i + 4, or two words of 8-bit codes.
//   4 bits: a strip is [32 lanes][4 words]: r0 and r0 + 8 of the first 32 features, then of the
//           others. Numbers: [strip][8 r0][4] of (scale, least).
//   8 bits: a strip is [2 groups][32 lanes][4 words]: two words of r0, two of r0 + 8. Numbers:
//           [strip][8 r0][4] of scale. Both: r0 and r0 + 8 of the first group, then of the other.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/element.cuh"

namespace bytetx::grouped {

constexpr int kBlockOutputs = 64, kBlockFeatures = 64;
constexpr int kStripOutputs = 16;
constexpr int kGroup = 32;  // features that share a scale

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

// Pair i of a word of eight 4-bit codes. number: scale and least.
template <typename T>
__device__ __forceinline__ uint32_t weights_of4(uint32_t codes, int i, uint32_t number) {
    using P = Pairs<T>;
    using Pair = typename P::Pair;
    const uint32_t word = masked(codes >> 4 * i, 0x000f000f, P::kMagic), magic = P::kMagic;
    const Pair numbers = reinterpret_cast<const Pair&>(number);
    const Pair pair =
        __hsub2(reinterpret_cast<const Pair&>(word), reinterpret_cast<const Pair&>(magic));
    const Pair weights = __hfma2(pair, P::both(numbers.x), P::both(numbers.y));
    return reinterpret_cast<const uint32_t&>(weights);
}

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

template <int kBits>
struct Codes {
    static constexpr int kStripBytes = kStripOutputs * kBlockFeatures * kBits / 8;
    static constexpr int kNumberBytes = kBits == 4 ? 4 : 2;
    static constexpr int kStripNumbers = kStripOutputs * 2;  // two groups
    static constexpr int kStrips = kBlockOutputs / kStripOutputs;
    static constexpr int kNumbersAt = kStrips * kStripBytes;
    static constexpr int kBytes = kNumbersAt + kStrips * kStripNumbers * kNumberBytes;
};

// Operand a of the four products of a block: a[4 * j + i] of features 16 * j on.
template <typename T, int kBits>
__device__ __forceinline__ void weights_of_block(const uint8_t* block, int strip, int lane,
                                                 uint32_t (&a)[16]) {
    using C = Codes<kBits>;
    const auto* codes = reinterpret_cast<const uint4*>(block + strip * C::kStripBytes) + lane;
    const uint8_t* numbers = block + C::kNumbersAt + (strip * 8 + lane / 4) * 4 * C::kNumberBytes;
    if constexpr (kBits == 4) {
        const uint4 words = *codes;
        const uint4 scales = *reinterpret_cast<const uint4*>(numbers);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Pairs 0 and 1 are features 0 and 8 of the first product, 2 and 3 of the next.
            const int to = i / 2 * 4 + i % 2 * 2;
            a[to] = weights_of4<T>(words.x, i, scales.x);
            a[to + 1] = weights_of4<T>(words.y, i, scales.y);
            a[8 + to] = weights_of4<T>(words.z, i, scales.z);
            a[8 + to + 1] = weights_of4<T>(words.w, i, scales.w);
        }
    } else {
        const uint2 scales = *reinterpret_cast<const uint2*>(numbers);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const uint4 words = codes[32 * group];
            const uint32_t both = group == 0 ? scales.x : scales.y;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int to = group * 8 + i / 2 * 4 + i % 2 * 2;
                a[to] = weights_of8<T>(i < 2 ? words.x : words.y, i, both, false);
                a[to + 1] = weights_of8<T>(i < 2 ? words.z : words.w, i, both, true);
            }
        }
    }
}

}  // namespace bytetx::grouped
