// Rows of 1024 columns.
#include "gemm/linear_norm_launch.cuh"

namespace bytetx::gemm {

template void launch_linear_norm<RowNorm1024>(const LinearNormParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
