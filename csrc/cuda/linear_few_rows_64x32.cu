// The tiling of 64 rows and 32 columns for few rows: see linear_few_rows.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_few_64x32(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<1, 1, 32>>(p, stream);
}

}  // namespace bytetx::gemm
