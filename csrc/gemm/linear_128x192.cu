// The tiling of 128 rows and 192 columns.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<Tile128x192>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
