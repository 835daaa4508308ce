// The tiling of 64 rows and 64 columns for small m, in pairs of CTAs.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<SmallM64x64Pair>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
