// The FP8 tiling of 128 rows and 192 columns: see fp8_linear_kernel.cuh.
#include "cuda/fp8_linear_launch.cuh"
#include "cuda/fp8_linear_tilings.cuh"

namespace bytetx::gemm {

void fp8_linear_128x192(const Fp8LinearParams& p, cudaStream_t stream) {
    launch_fp8_tiling<Tiling<2, 192, 5, true>>(p, stream);
}

}  // namespace bytetx::gemm
