// Keys and values in FP8: E4M3 codes, and for each vector of a head a scale that is a power of two,
// stored as its exponent plus 127 (E8M0); bytetx/ops/kv_codes.py defines both. A code times its
// scale is a number of bf16, and of f16, exactly.
#pragma once

#include <cstdint>

#include "cuda/attention_math.cuh"

namespace bytetx {

constexpr int kLeastScale = 105, kLargestScale = 134, kNanScale = 255;

// Two scales as T, each times what restore_pair leaves out. A NaN becomes inf, whose products show.
template <typename T>
__device__ __forceinline__ uint32_t scale_pair(int low, int high) {
    const auto factor = [](int scale) -> uint32_t {
        if constexpr (is_half<T>) return min(max(scale - 104, 0), 31) << 10;
        return min(scale + 120, 255) << 7;
    };
    return factor(low) | factor(high) << 16;
}

// Two of a word's four codes as T, times their scales. A code's seven bits are exponent and
// significand of a T that is 2^8 (f16) or 2^120 (bf16) times too small; prmt extends its sign.
template <typename T, int kFirst, int kSecond>
__device__ __forceinline__ uint32_t restore_pair(uint32_t codes, uint32_t scales) {
    constexpr uint32_t kBytes =
        kFirst | (kFirst | 8) << 4 | kSecond << 8 | static_cast<uint32_t>(kSecond | 8) << 12;
    uint32_t wide, pair;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(codes), "n"(kBytes));
    if constexpr (is_half<T>) {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(wide << 7 & 0xbf80bf80u), "r"(scales));
    } else {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(wide << 4 & 0x87f087f0u), "r"(scales));
    }
    return pair;
}

// The scale of a vector whose largest number has these bits, without their sign.
__device__ __forceinline__ int scale_of(int largest) {
    // A significand above 1.75 (448 is 1.75 * 2^8) carries into the exponent.
    const int scale = min(max((largest + 0x1fffff >> 23) - 8, kLeastScale), kLargestScale);
    return largest >= 0x7f800000 ? kNanScale : scale;
}

// Four numbers of a vector with this scale as codes.
__device__ __forceinline__ uint32_t round_to_codes(const float* x, int scale) {
    const float inverse = __int_as_float(max(254 - scale, 0) << 23);
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(low)
        : "f"(x[1] * inverse), "f"(x[0] * inverse));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(high)
        : "f"(x[3] * inverse), "f"(x[2] * inverse));
    return low | static_cast<uint32_t>(high) << 16;
}

}  // namespace bytetx
