// The tilings that linear.cu chooses from; each is compiled in a file of its own, or with its like.
#pragma once

#include <cuda_runtime.h>

#include "ops.h"

namespace bytetx::gemm {

void linear_128x192(const LinearParams& p, cudaStream_t stream);
void linear_192x128(const LinearParams& p, cudaStream_t stream);
void linear_128x128(const LinearParams& p, cudaStream_t stream);
void linear_192x128_single(const LinearParams& p, cudaStream_t stream);
void linear_small_m_64x32(const LinearParams& p, cudaStream_t stream);
void linear_small_m_64x64(const LinearParams& p, cudaStream_t stream);
void linear_small_m_64x96(const LinearParams& p, cudaStream_t stream);
void linear_small_m_128x64(const LinearParams& p, cudaStream_t stream);
void linear_small_m_128x96(const LinearParams& p, cudaStream_t stream);
void linear_small_m_128x128(const LinearParams& p, cudaStream_t stream);
void linear_small_m_192x128(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
