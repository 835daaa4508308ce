// all_gather_gemm in tiles of 128 rows and 128 columns: see gather_kernel.cuh.
#include "comm/comm_tilings.cuh"
#include "comm/gather_launch.cuh"

namespace bytetx::gemm {

void all_gather_gemm_128x128(const AllGatherGemmParams& p, cudaStream_t stream) {
    launch_gather_tiling<Tiling<2, 128, 6, 2>>(p, stream);
}

}  // namespace bytetx::gemm
