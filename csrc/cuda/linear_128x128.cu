// The tiling of 128 rows and 128 columns: see linear_kernel.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_128x128(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<Tiling<2, 128, 7, 2>>(p, stream);
}

}  // namespace bytetx::gemm
