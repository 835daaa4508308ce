// The GEMM of gemm_all_reduce in all its tilings, rows of tokens by columns: see
// one_shot_kernel.cuh. Stages: as many as let three, two or one CTA share an SM.
#include "comm/comm_tilings.cuh"
#include "comm/one_shot_kernel.cuh"

namespace bytetx::gemm {

void gemm_push_16x64(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 16, 7>>(p, is_for_all, stream);
}
void gemm_push_16x128(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 16, 12>>(p, is_for_all, stream);
}
void gemm_push_32x64(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 32, 6>>(p, is_for_all, stream);
}
void gemm_push_32x128(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 32, 10>>(p, is_for_all, stream);
}
void gemm_push_64x64(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 64, 7>>(p, is_for_all, stream);
}
void gemm_push_64x128(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 64, 9>>(p, is_for_all, stream);
}
void gemm_push_128x128(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 2, 128, 7>>(p, is_for_all, stream);
}
void gemm_push_256x64(const GemmSumParams& p, bool is_for_all, cudaStream_t stream) {
    launch_one_shot_tiling<SmallMTiling<1, 1, 256, 5>>(p, is_for_all, stream);
}

}  // namespace bytetx::gemm
