// Rows of 1024 columns: see linear_norm_kernel.cuh.
#include "cuda/linear_norm_launch.cuh"
#include "cuda/linear_norm_tilings.cuh"

namespace bytetx::gemm {

void linear_norm_1024(const LinearNormParams& p, cudaStream_t stream) {
    launch_row_norm_tiling<RowNorm1024>(p, stream);
}

}  // namespace bytetx::gemm
