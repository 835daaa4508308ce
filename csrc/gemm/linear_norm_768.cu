// Rows of 768 columns.
#include "gemm/linear_norm_launch.cuh"

namespace bytetx::gemm {

template void launch_linear_norm<RowNorm768>(const LinearNormParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
