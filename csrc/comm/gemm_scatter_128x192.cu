// The GEMM of gemm_reduce_scatter, and of gemm_all_reduce, in tiles of 128 rows and 192 columns.
#include "comm/scatter_launch.cuh"

namespace bytetx::gemm {

template void launch_scatter<Tile128x192>(const GemmSumParams& p, bool to_all_ranks,
                                          cudaStream_t stream);

}  // namespace bytetx::gemm
