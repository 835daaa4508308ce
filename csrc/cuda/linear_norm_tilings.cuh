// The widths that linear_norm.cu has; each is compiled in a file of its own.
#pragma once

#include <cuda_runtime.h>

#include "cuda/linear_norm_types.cuh"
#include "linear_norm_ops.h"

namespace bytetx::gemm {

using RowNorm384 = RowNormTiling<2, 192, 4, 2, 1>;
using RowNorm384Short = RowNormTiling<1, 192, 6, 2, 1>;
using RowNorm768 = RowNormTiling<2, 192, 4, 2, 2>;
using RowNorm1024 = RowNormTiling<2, 128, 5, 2, 4>;

void linear_norm_384(const LinearNormParams& p, cudaStream_t stream);
void linear_norm_768(const LinearNormParams& p, cudaStream_t stream);
void linear_norm_1024(const LinearNormParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
