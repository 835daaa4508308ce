// The contract of the linear layer that rotates heads: see ops.h, whose types it uses.
#pragma once

#include "ops.h"

namespace bytetx {

// cuda only. d = a b^T + bias, rounded, of which heads of 64 features are then rotated by the
// angles of their token's position, in pairs (i, i + 32): f32 inside, the bits of linear() and
// rotary().
struct LinearRotaryParams {
    const void* a;                // [m, k], dtype, contiguous and 16-byte aligned like all operands
    const void* b;                // [n, k]
    const void* bias;             // [n], or null for none
    const float* cos;             // [num_positions, 32]
    const float* sin;             // as cos
    const int32_t* position_ids;  // [m], each in [0, num_positions)
    void* d;                      // [m, n]; none of the others
    int64_t m;
    int64_t n;                // a multiple of 64
    int64_t k;                // a multiple of 8
    int32_t rotated_columns;  // columns [0, rotated_columns) are rotated; a multiple of 64
    int32_t tiling;  // an index into linear_tilings(), of many rows and multiples of 64 columns
    DType dtype;     // f16 or bf16
};

void linear_rotary(const LinearRotaryParams& p, const Launch& launch);

}  // namespace bytetx
