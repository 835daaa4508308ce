// The GEMM of gemm_all_reduce in all its tilings: see push_kernel.cuh.
#include "comm/comm_tilings.cuh"
#include "comm/push_kernel.cuh"

namespace bytetx::gemm {

void gemm_push_64x32(const GemmSumParams& p, cudaStream_t stream) {
    launch_push_tiling<FewRowsTiling<1, 1, 32, 8>>(p, stream);
}
void gemm_push_64x64(const GemmSumParams& p, cudaStream_t stream) {
    launch_push_tiling<FewRowsTiling<1, 1, 64, 6>>(p, stream);
}
void gemm_push_128x64(const GemmSumParams& p, cudaStream_t stream) {
    launch_push_tiling<FewRowsTiling<1, 2, 64, 4>>(p, stream);
}
void gemm_push_128x128(const GemmSumParams& p, cudaStream_t stream) {
    launch_push_tiling<FewRowsTiling<1, 2, 128, 6>>(p, stream);
}

}  // namespace bytetx::gemm
