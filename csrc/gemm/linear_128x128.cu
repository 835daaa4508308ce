// The tiling of 128 rows and 128 columns.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<Tile128x128>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
