// The tiling of 128 rows and 128 columns for small m, in pairs of CTAs.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<SmallM128x128Pair>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
