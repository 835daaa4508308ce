// The tiling of 64 rows and 96 columns for small m.
#include "gemm/linear_launch.cuh"

namespace bytetx::gemm {

template void launch_linear<SmallM64x96>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
