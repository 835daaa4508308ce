// Products with weights that lie in panels, and what stands between the products of a decode step:
// the part of ops.h that only cpu implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// How a weight lies in memory.
enum class PanelFormat : int32_t {
    words,     // f32 or bf16
    bf16_dot,  // bf16, multiplied by the processor's instruction for it (vdpbf16ps), not in f32
    int8,      // codes of 8 bits in groups of 32 features, see cpu/group_kernel.h
    int4,      // codes of 4 bits
};

// A linear layer's weight [n, k] as vectors of outputs: [panels, features, columns], where a panel
// has `columns` outputs and bf16 keeps 2 neighbouring features of an output behind one another.
// Outputs are filled up to whole panels and features to `features`; what fills them up counts as
// zero and may be anything finite.
struct PanelMatrix {
    const void* weight;   // 64-byte aligned
    const void* bias;     // [n], dtype of the rows, or null for none
    const float* factor;  // [n], of every output's codes; null where there are no codes
    int64_t n;
    int64_t k;
    int64_t features;  // k or more, even in bf16, whole groups of codes
    int32_t columns;   // a multiple of 16, or 1 of plain f32 rows; of codes 16
    // Features of a chain of f32 sums, even in bf16; chains are added in order. Codes have none.
    int32_t chain;
    PanelFormat format;
};

// cpu only, on processors with AVX2 or NEON. d = act(x @ w.T + bias): for few rows the weight is
// read once. A result depends on its row and output alone, bit for bit.
struct PanelLinearParams {
    const void* x;    // [m, k], dtype, contiguous
    void* d;          // [m, n]
    void* workspace;  // panel_linear_workspace_bytes(), 64-byte aligned, any content
    int64_t workspace_bytes;
    int64_t m;
    PanelMatrix w;
    Activation activation;
    DType dtype;  // f32 or bf16, and the weight's where it has no codes
};

int64_t panel_linear_workspace_bytes(int64_t m, int64_t k);
void panel_linear(const PanelLinearParams& p, const Launch& launch);

// cpu only, on processors with AVX2 or NEON. out = act(gates) * values, in f32; gates and values
// take turns in blocks of `block` columns.
struct GateBlocksParams {
    const void* both;  // [m, 2 * n], dtype, contiguous
    void* out;         // [m, n]
    int64_t m;
    int64_t n;  // a multiple of block
    int64_t block;
    Activation activation;
    DType dtype;  // f32 or bf16
};

void gate_blocks(const GateBlocksParams& p, const Launch& launch);

// The instruction set that these run with by themselves, for people, or null where they cannot run.
const char* panel_linear_isa();

}  // namespace bytetx
