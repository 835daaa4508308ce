// The FP8 tiling of 64 rows and 64 columns: see fp8_linear_kernel.cuh.
#include "cuda/fp8_linear_launch.cuh"
#include "cuda/fp8_linear_tilings.cuh"

namespace bytetx::gemm {

void fp8_linear_64x64(const Fp8LinearParams& p, cudaStream_t stream) {
    launch_fp8_tiling<Tiling<1, 64, 12, 1>>(p, stream);
}

}  // namespace bytetx::gemm
