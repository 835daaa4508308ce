// Every row kernel in the including file's instruction set.
#pragma once

#include "cpu/embedding_kernel.h"
#include "cpu/norm_kernel.h"
#include "cpu/pooling_kernel.h"
#include "cpu/rows.h"

namespace bytetx::cpu::BYTETX_SIMD {

// Declared here so that the constant, which a table in another file names, is not file-local.
extern const RowKernels kRowKernels;

constexpr RowKernels make_row_kernels() {
    return {norm_rows<RowNorm::layer>, norm_rows<RowNorm::rms>, embed_rows, pool_columns,
            normalize_vector};
}

}  // namespace bytetx::cpu::BYTETX_SIMD
