// The tiling of 192 rows and 128 columns without pairs of CTAs, where a pair's rows would be too
// many: see linear_kernel.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_192x128_single(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<Tiling<3, 128, 5, 1>>(p, stream);
}

}  // namespace bytetx::gemm
