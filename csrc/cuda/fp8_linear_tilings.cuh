// The tilings that fp8_linear.cu chooses from.
#pragma once

#include <cuda_runtime.h>

#include "ops.h"

namespace bytetx::gemm {

void fp8_linear_128x128(const Fp8LinearParams& p, cudaStream_t stream);
void fp8_linear_64x128(const Fp8LinearParams& p, cudaStream_t stream);
void fp8_linear_64x64(const Fp8LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
