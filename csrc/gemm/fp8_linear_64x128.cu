// The FP8 tiling of 64 rows and 128 columns.
#include "gemm/fp8_linear_launch.cuh"

namespace bytetx::gemm {

template void launch_fp8_linear<Fp8Tile64x128>(const Fp8LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
