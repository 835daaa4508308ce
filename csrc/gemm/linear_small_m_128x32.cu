// The tiling of 128 rows and 32 columns for small m.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<SmallM128x32>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
