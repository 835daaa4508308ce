// The tiling of 64 rows and 96 columns for small m: see linear_small_m.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_small_m_64x96(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<SmallMTiling<1, 1, 96>>(p, stream);
}

}  // namespace bytetx::gemm
