// Rows of 384 columns: see linear_norm_kernel.cuh.
#include "cuda/linear_norm_launch.cuh"
#include "cuda/linear_norm_tilings.cuh"

namespace bytetx::gemm {

// Tiles of 64 rows up to here: two waves of 128 rows leave too little to hide ends under. Measured
// on an H200: 2048 rows 5.6 us against 8.1, 16384 15.0 against 15.5, 32768 27.8 against 27.1.
constexpr int64_t kMostShortRows = 16384;

void linear_norm_384(const LinearNormParams& p, cudaStream_t stream) {
    if (p.m <= kMostShortRows) return launch_row_norm_tiling<RowNorm384Short>(p, stream);
    launch_row_norm_tiling<RowNorm384>(p, stream);
}

}  // namespace bytetx::gemm
