// The tilings of gemm_all_reduce for small m, rows of tokens by columns.
#include "comm/one_shot_launch.cuh"

namespace bytetx::gemm {

template void launch_one_shot<OneShot16x64>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot16x128>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot32x64>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot32x128>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot64x64>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot64x128>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot128x128>(const GemmSumParams& p, cudaStream_t stream);
template void launch_one_shot<OneShot256x64>(const GemmSumParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
