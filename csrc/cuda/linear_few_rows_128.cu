// The tilings of 128 rows for few rows: see linear_few_rows.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_128x32(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<2, 32, 8>>(p, stream);
}

void linear_128x64(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<2, 64, 8>>(p, stream);
}

void linear_few_128x128(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<2, 128, 6>>(p, stream);
}

}  // namespace bytetx::gemm
