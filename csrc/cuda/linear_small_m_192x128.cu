// The tiling of 192 rows and 128 columns for small m: see linear_small_m.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_small_m_192x128(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<SmallMTiling<3, 1, 128, 4>>(p, stream);
}

}  // namespace bytetx::gemm
