#pragma once

#include "ops.h"

namespace bytetx {

// cuda only. d = act(a_scale b_scale (a b^T) + bias + residual), a and b E4M3, f32 accumulation.
struct Fp8LinearParams {
    const uint8_t* a;      // [m, k], contiguous and 16-byte aligned like all operands
    const uint8_t* b;      // [n, k]
    const float* a_scale;  // [m], or null for ones
    const float* b_scale;  // [n]
    const float* bias;     // [n], or null for none
    const void* residual;  // [m, n], dtype, or null for none; only with activation none and no E4M3 d
    void* d;               // [m, n], dtype (may be the residual), or E4M3 of d / d_scale
    int64_t m;
    int64_t n;  // a multiple of 32
    int64_t k;  // a multiple of 16
    Activation activation;
    bool is_d_fp8;
    float d_scale;  // what is beyond 448 of it is cut off
    int32_t tiling;  // an index into fp8_linear_tilings()
    DType dtype;     // f16 or bf16
};

int32_t num_fp8_linear_tilings();
LinearTiling fp8_linear_tiling(int32_t index);
void fp8_linear(const Fp8LinearParams& p, const Launch& launch);

}  // namespace bytetx
