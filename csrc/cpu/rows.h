// The row kernels, one table of them for each instruction set.
//
// Kernels are written once, in <op>_kernel.h, against the vector of simd.h; rows_<set>.cpp compiles
// them with that set's flags. They work on a range of rows and are called inside a parallel loop.
#pragma once

#include "ops.h"

namespace bytetx::cpu {

// The widest row that kernels take: a row is staged on the stack, in f32 (64 KiB).
constexpr int64_t kMaxRowWidth = 16384;

struct RowKernels {
    // Rows [begin, end).
    void (*layer_norm)(const NormParams& p, int64_t begin, int64_t end);
    void (*rms_norm)(const NormParams& p, int64_t begin, int64_t end);
    void (*embed)(const EmbedParams& p, int64_t begin, int64_t end);
    // Columns [begin, end) of one sequence's vector, before it is normalised.
    void (*pool)(const PoolParams& p, int64_t sequence, int64_t begin, int64_t end);
    // x = x / max(|x|, 1e-12), n floats.
    void (*normalize)(float* x, int64_t n);
};

// The kernels of `isa`, checked by resolve_isa.
const RowKernels& row_kernels(Isa isa);

// Throws std::invalid_argument unless kernels take rows of this type and width.
void check_rows(const char* op, DType dtype, int64_t hidden_size);

// Rows of a piece of work that is worth a thread's wake-up.
int64_t rows_per_piece(int64_t hidden_size);

}  // namespace bytetx::cpu
