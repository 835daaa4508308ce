// The tiling of 128 rows and 192 columns: see linear_kernel.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_128x192(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<Tiling<2, 192, 5, 2>>(p, stream);
}

}  // namespace bytetx::gemm
