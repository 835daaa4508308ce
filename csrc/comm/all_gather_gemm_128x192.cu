// all_gather_gemm in tiles of 128 rows and 192 columns.
#include "comm/gather_launch.cuh"

namespace bytetx::gemm {

template void launch_all_gather_gemm<Tile128x192>(const AllGatherGemmParams& p,
                                                  cudaStream_t stream);

}  // namespace bytetx::gemm
