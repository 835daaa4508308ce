// The tilings of 128 rows and 192 columns, by pairs of CTAs and
// by single ones: see linear_kernel.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_128x192(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<Tiling<2, 192, 5, 2>>(p, stream);
}

void linear_128x192_single(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<Tiling<2, 192, 5, 1>>(p, stream);
}

}  // namespace bytetx::gemm
