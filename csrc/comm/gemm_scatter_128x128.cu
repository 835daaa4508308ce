// The GEMM of gemm_reduce_scatter, and of gemm_all_reduce, in tiles of 128 rows and 128 columns:
// see scatter_kernel.cuh.
#include "comm/comm_tilings.cuh"
#include "comm/scatter_launch.cuh"

namespace bytetx::gemm {

void gemm_scatter_128x128(const GemmSumParams& p, bool to_all_ranks, cudaStream_t stream) {
    launch_scatter_tiling<Tiling<2, 128, 6, 2>>(p, to_all_ranks, stream);
}

}  // namespace bytetx::gemm
