// The contract of the linear layer that norms its rows: see ops.h, whose types it uses.
#pragma once

#include "ops.h"

namespace bytetx {

// cuda only. d = layer_norm(a b^T + bias + residual) * weight + shift, all of it f32 inside.
struct LinearNormParams {
    const void* a;         // [m, k], dtype, contiguous and 16-byte aligned like all operands
    const void* b;         // [n, k]
    const void* bias;      // [n]
    const void* residual;  // [m, n]
    const void* weight;    // [n]
    const void* shift;     // [n]
    void* d;               // [m, n]; none of the others
    // linear_norm_workspace_bytes(m, n), or more: all bits set before the first call, and again
    // after every call. Calls that may run at the same time need one each. Null for 0 bytes.
    void* workspace;
    int64_t m;
    int64_t n;  // 384, 768 or 1024
    int64_t k;  // a multiple of 8
    float eps;
    DType dtype;  // f16 or bf16
};

int64_t linear_norm_workspace_bytes(int64_t m, int64_t n);
void linear_norm(const LinearNormParams& p, const Launch& launch);

}  // namespace bytetx
