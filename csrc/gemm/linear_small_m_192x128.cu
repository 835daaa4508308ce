// The tiling of 192 rows and 128 columns for small m.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<SmallM192x128>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
