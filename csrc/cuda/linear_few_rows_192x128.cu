// The tiling of 192 rows and 128 columns for few rows: see linear_few_rows.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_few_192x128(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<3, 1, 128, 4>>(p, stream);
}

}  // namespace bytetx::gemm
