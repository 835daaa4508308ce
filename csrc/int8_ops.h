// Linear layers of 8-bit integers: the part of ops.h that only cpu implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// cpu only, on processors with AVX2 or NEON. d = act(x @ w.T + bias), rows of x rounded to 8 bits:
// x[i] is about scale * (q[i] - zero), where scale and zero map the row's least and largest value,
// or 0 where that lies beyond them, to -128 and 127. A row with a NaN or infinity gives NaN.
struct Int8LinearParams {
    const void* x;              // [m, k], dtype, contiguous
    const uint8_t* weight;      // w + 128, [n / 32, k / 4, 32, 4]: 4 features of 32 outputs behind
                                // one another, n and k filled up with any numbers
    const float* weight_scale;  // [n filled up to 32]: w * weight_scale is about the layer's weight
    const float* weight_sum;    // as weight_scale: weight_scale times the sum of an output's w
    const float* bias;          // as weight_scale, zeros where the layer has none
    void* d;                    // [m, n], dtype
    void* workspace;            // int8_linear_workspace_bytes long, 64-byte aligned
    int64_t workspace_bytes;
    int64_t m;
    int64_t n;
    int64_t k;
    Activation activation;
    DType dtype;  // f32 or bf16
};

int64_t int8_linear_workspace_bytes(int64_t m, int64_t k, int num_threads);
void int8_linear(const Int8LinearParams& p, const Launch& launch);

// The instruction set that it runs with by itself, for people, or null where it cannot run.
const char* int8_linear_isa();

}  // namespace bytetx
