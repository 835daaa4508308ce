// Rows of 384 columns, in tiles of 128 and of 64 rows.
#include "gemm/linear_norm_launch.cuh"

namespace bytetx::gemm {

template void launch_linear_norm<RowNorm384>(const LinearNormParams& p, cudaStream_t stream);
template void launch_linear_norm<RowNorm384Short>(const LinearNormParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
