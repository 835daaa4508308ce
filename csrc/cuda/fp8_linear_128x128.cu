// The FP8 tiling of 128 rows and 128 columns: see fp8_linear_kernel.cuh.
#include "cuda/fp8_linear_launch.cuh"
#include "cuda/fp8_linear_tilings.cuh"

namespace bytetx::gemm {

void fp8_linear_128x128(const Fp8LinearParams& p, cudaStream_t stream) {
    launch_fp8_tiling<Tiling<2, 128, 7, 1>>(p, stream);
}

}  // namespace bytetx::gemm
