// The tiling of 192 rows and 128 columns.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<Tile192x128>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
