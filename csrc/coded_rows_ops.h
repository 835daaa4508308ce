// Weights as rows of codes, before they are laid out for products: the part of ops.h that only cpu
// implements.
//
// A row of k features, 32 to a group, is of each group a block as GGUF has it: with 4 bits Q4_1's
// (f16 scale, f16 least, 16 bytes whose low halves are features 0 to 15), with 8 bits Q8_0's (f16
// scale, 32 int8). Behind them stands one f32 factor, by which all of the row is multiplied: a
// power of two, or NaN where the row holds a number that is not finite.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// Formats of a GGUF file that rows are made of: all but Q6_K's keep their codes.
enum class SavedFormat : int32_t {
    q4_0,  // as 4 or 8 bits
    q4_1,  // as 4 bits
    q4_k,  // as 4 bits; scales and least values are rounded to f16
    q5_0,  // as 8 bits
    q8_0,  // as 8 bits
    q6_k,  // rounded, as numbers are
};

// Each group's scale, and with 4 bits its least value, are those of a few with the least square
// error.
struct RoundRowsParams {
    const void* x;  // [n, k], dtype, contiguous
    void* rows;     // [n] rows of codes
    int64_t n;
    int64_t k;  // the last number fills up the last group
    int32_t bits;
    DType dtype;  // f32 or bf16
};

void round_rows(const RoundRowsParams& p, const Launch& launch);

struct ConvertRowsParams {
    const void* blocks;  // [n, bytes of the format's blocks for k features]
    void* rows;          // [n] rows of codes
    int64_t n;
    int64_t k;  // whole blocks
    int32_t bits;
    SavedFormat format;
};

void convert_rows(const ConvertRowsParams& p, const Launch& launch);

// Rows of codes in strips of 16 outputs, as PanelMatrix has them.
struct StackRowsParams {
    const void* rows;  // [n] rows of codes
    void* strips;      // [ceil(n / 16), groups, bytes of a group of 16 outputs]
    float* factor;     // [n]
    int64_t n;
    int64_t k;
    int32_t bits;
};

void stack_rows(const StackRowsParams& p, const Launch& launch);

}  // namespace bytetx
