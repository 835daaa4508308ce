// The contract of the linear layer whose shares of k are added up by the norm behind it: see ops.h,
// whose types it uses.
#pragma once

#include "ops.h"

namespace bytetx {

// cuda only. h = a b^T + bias + residual;  d = norm(h) * weight + shift, all of it f32 inside, in
// two kernels.
struct SplitNormParams {
    const void* a;         // [m, k], dtype, contiguous and 16-byte aligned like all operands
    const void* b;         // [n, k]
    const void* bias;      // [n], or null for none
    const void* residual;  // [m, n], or null for none
    const void* weight;    // [n]
    const void* shift;     // [n], or null for none; null where is_rms
    void* d;               // [m, n]; may be the residual
    void* sum_out;         // h, [m, n]; may be the residual but not d; or null
    float* parts;          // [split_k, m, n], scratch memory
    int64_t m;
    int64_t n;        // a multiple of 32, at most 8192
    int64_t k;        // a multiple of 8
    int32_t tiling;   // an index into linear_tilings(), for small m and not in pairs
    int32_t split_k;  // shares of k, at least 1; fewer where k has not as many blocks of 64
    bool is_rms;      // RMS norm, else layer norm
    float eps;
    DType dtype;  // f16 or bf16
};

void split_norm(const SplitNormParams& p, const Launch& launch);

}  // namespace bytetx
