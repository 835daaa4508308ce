// all_gather_gemm in tiles of 128 rows and 128 columns.
#include "comm/gather_launch.cuh"

namespace bytetx::gemm {

template void launch_all_gather_gemm<CommTile128x128>(const AllGatherGemmParams& p,
                                                      cudaStream_t stream);

}  // namespace bytetx::gemm
