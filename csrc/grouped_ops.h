// Linear layers whose weights are codes of 8 or 4 bits: the part of ops.h that only cuda
// implements.
//
// Codes lie in blocks of 64 outputs and 64 features, [ceil(n / 64), ceil(k / 64)], each of them
// four strips of 16 outputs and then their numbers: of 32 features of an output one or two, which
// GroupForm makes weights of. A factor of the output multiplies their sum. cuda/grouped_codes.cuh
// has the order within a block.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// A weight of its code and its group's numbers.
enum class GroupForm : int32_t {
    symmetric,  // scale * (code - 128), of 8 bits alone: one number
    least,      // scale * code + least
    zero,    // scale * (code - zero); stored with what codes are decoded with (grouped_codes.cuh)
    halves,  // scale * (code - 128), a scale for 16 features, of 8 bits alone
};

// d = act(x @ w.T + bias) + residual, or of gates and values the gated product. Weights are rounded
// to dtype, sums are f32.
struct GroupedLinearParams {
    const void* x;         // [m, k], dtype, contiguous and 16-byte aligned
    const uint8_t* codes;  // 128-byte aligned
    const float* factor;   // [n]
    const void* bias;      // [n], dtype, or null for none
    const void* residual;  // [m, n], or null for none; none where gated
    void* d;               // [m, n], gated [m, n / 2]
    int64_t m;
    int64_t n;
    int64_t k;  // a multiple of 8
    Activation activation;
    bool gated;  // 32 outputs of gates and 32 of values take turns; n is a multiple of 64
    int32_t bits;
    GroupForm form;
    DType dtype;   // f16 or bf16
    int32_t tile;  // tokens of a tile, 128 or 256, where n is whole strips of 16; 0: as is fastest
};
void grouped_linear(const GroupedLinearParams& p, const Launch& launch);

// The matrix's rows, rounded to dtype: all n of them, or those of indices; a row of NaN where an
// index is outside.
struct GroupedRowsParams {
    const uint8_t* codes;
    const float* factor;     // [n]
    const int64_t* indices;  // [num_rows], or null for all rows in order
    void* out;               // [num_rows, k], 16-byte aligned
    int64_t num_rows;
    int64_t n;
    int64_t k;  // a multiple of 8
    int32_t bits;
    GroupForm form;
    DType dtype;  // f16 or bf16
};
void grouped_rows(const GroupedRowsParams& p, const Launch& launch);

}  // namespace bytetx
