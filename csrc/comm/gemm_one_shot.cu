// The tilings of gemm_all_reduce for small m, rows of tokens by columns: see one_shot_kernel.cuh.
// The number of stages lets three, two or one CTA share an SM.
#include "comm/comm_tilings.cuh"
#include "comm/one_shot_kernel.cuh"

namespace bytetx::gemm {

void gemm_small_m_16x64(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 16, 7>>(p, stream);
}
void gemm_small_m_16x128(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 16, 12>>(p, stream);
}
void gemm_small_m_32x64(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 32, 6>>(p, stream);
}
void gemm_small_m_32x128(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 32, 10>>(p, stream);
}
void gemm_small_m_64x64(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 64, 7>>(p, stream);
}
void gemm_small_m_64x128(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 64, 9>>(p, stream);
}
void gemm_small_m_128x128(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 128, 7>>(p, stream);
}
void gemm_small_m_256x64(const GemmSumParams& p, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 256, 5>>(p, stream);
}

}  // namespace bytetx::gemm
