// The tiling of 192 rows and 128 columns without pairs of CTAs, where a pair's rows would be too
// many.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<Tile192x128Single>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
