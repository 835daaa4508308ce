// Scalars of the attention kernels, packed and paged: powers of two, quads of lanes, pairs of T.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/element.cuh"

namespace bytetx {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;

template <typename T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, Half>;

// 2^x to 2 ulp, subnormal results flushed: the weights are rounded to 11 bits right after.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to 1 ulp; x is no subnormal. 0 of infinity.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// softcap * tanh(score * scale / softcap) by one exponential: from products to capped scores.
struct Softcap {
    float exponent;  // 2 log2(e) scale / softcap
    float cap;       // in the units of the result

    // 1 - 2 / (1 + e^2x): within cap * 2^-22, which is far below the rounding of weights.
    __device__ __forceinline__ float operator()(float product) const {
        return fmaf(-2.0f * cap, reciprocal_approx(1.0f + exp2_approx(product * exponent)), cap);
    }
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullMask, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFullMask, x, 1);
    return x + __shfl_xor_sync(kFullMask, x, 2);
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    if constexpr (is_half<T>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

}  // namespace bytetx
