// Rows of 768 columns: see linear_norm_kernel.cuh.
#include "cuda/linear_norm_launch.cuh"
#include "cuda/linear_norm_tilings.cuh"

namespace bytetx::gemm {

void linear_norm_768(const LinearNormParams& p, cudaStream_t stream) {
    launch_row_norm_tiling<RowNorm768>(p, stream);
}

}  // namespace bytetx::gemm
