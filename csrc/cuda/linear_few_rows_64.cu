// The tilings of 64 rows for few rows: see linear_few_rows.cuh.
#include "cuda/linear_launch.cuh"
#include "cuda/linear_tilings.cuh"

namespace bytetx::gemm {

void linear_64x32(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<1, 32, 12>>(p, stream);
}

void linear_64x64(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<1, 64, 12>>(p, stream);
}

void linear_64x64_shallow(const LinearParams& p, cudaStream_t stream) {
    launch_tiling<FewRowsTiling<1, 64, 4>>(p, stream);
}

}  // namespace bytetx::gemm
