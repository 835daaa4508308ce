// The tiling of 128 rows and 96 columns for small m: see linear_small_m.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_small_m_128x96(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<SmallMTiling<2, 1, 96, 5>>(p, stream);
}

}  // namespace bytetx::gemm
