// Gates of a product that another GEMM made: the part of ops.h that only cuda implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// cuda only. What LinearParams' gated makes of a product, where another GEMM made it.
struct GateRowsParams {
    const void* both;  // [m, 2 * n], dtype, contiguous and 16-byte aligned
    void* out;         // [m, n]
    int64_t m;
    int64_t n;              // a multiple of 32
    Activation activation;  // gelu, gelu_tanh or silu
    DType dtype;            // f16 or bf16
};

void gate_rows(const GateRowsParams& p, const Launch& launch);

}  // namespace bytetx
