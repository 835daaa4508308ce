// A linear layer, the residual behind it and their layer norm in one pass over memory.
//
//   h = a b^T + bias + residual;  d = (h - mean(h)) * rsqrt(var(h) + eps) * weight + shift
//
// a [m, k], b [n, k], residual and d [m, n], n 384, 768 or 1024; f16 or bf16, f32 inside: h is not
// rounded before it is normalized.
//
// gemm/kernel.cuh with gemm/row_norm_epilogue.cuh: a producer warp for a and b, one for residuals,
// two warpgroups that take tiles in turn; the CTAs that share rows exchange the moments of their
// columns while the other warpgroup of each multiplies. Groups of CTAs that wait for one another
// are neighbours in the grid, which has no more CTAs than fit: hardware starts them in order, so
// that at most one group is there in part, and every other one ends.
//
// Bytes: (m * k + 2 * m * n) * 2 and the weight. Bound by the matrix unit, at k = 384 by HBM. On an
// H200 0.65 to 0.90 of the time of GEMM and norm in two kernels at n = 384 (2026-11-21); more in
// docs/kernels/linear.md. Source: moments are joined as by Chan, Golub and LeVeque (1979).
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "gemm/launchers.h"
#include "gemm/tilings.cuh"

namespace bytetx {
namespace {

struct Width {
    int64_t n;
    int64_t tile_m, workspace_bytes;  // rows of a tile, and what one needs
    void (*launch)(const LinearNormParams&, cudaStream_t);
};

template <typename Tile>
constexpr Width width_of(void (*launch)(const LinearNormParams&, cudaStream_t)) {
    constexpr int64_t kBytes =
        Tile::kParts == 1 ? 0
                          : int64_t{8} * Tile::kParts * Tile::kGroupCtas * gemm::kWarpgroupThreads;
    return {Tile::kColumns, 64 * Tile::kRowBlocks, kBytes, launch};
}

// Tiles of 64 rows up to here: two waves of 128 rows leave too little to hide epilogues under.
// Measured on an H200: 2048 rows 5.6 us against 8.1, 16384 15.0 against 15.5, 32768 27.8 against
// 27.1.
constexpr int64_t kMostShortRows = 16384;

void launch_384(const LinearNormParams& p, cudaStream_t stream) {
    if (p.m <= kMostShortRows) return gemm::launch_linear_norm<gemm::RowNorm384Short>(p, stream);
    gemm::launch_linear_norm<gemm::RowNorm384>(p, stream);
}

constexpr Width kWidths[] = {
    width_of<gemm::RowNorm384>(launch_384),
    width_of<gemm::RowNorm768>(gemm::launch_linear_norm<gemm::RowNorm768>),
    width_of<gemm::RowNorm1024>(gemm::launch_linear_norm<gemm::RowNorm1024>),
};

const Width& find_width(int64_t n) {
    for (const Width& width : kWidths) {
        if (width.n == n) return width;
    }
    throw std::invalid_argument("linear_norm needs n 384, 768 or 1024; got " + std::to_string(n));
}

void check(const LinearNormParams& p) {
    const auto fail = [&](const char* need) {
        throw std::invalid_argument("linear_norm needs " + std::string(need) +
                                    "; got m, n, k = " + std::to_string(p.m) + ", " +
                                    std::to_string(p.n) + ", " + std::to_string(p.k));
    };
    if (p.m < 0 || p.m > INT32_MAX / 2) fail("0 <= m < 2^30");
    if (p.k <= 0 || p.k % 8 != 0 || p.k > INT32_MAX) fail("k > 0 and k % 8 == 0");
    if (p.dtype == DType::f32) fail("f16 or bf16");
    if (!p.bias || !p.residual || !p.weight || !p.shift) fail("bias, residual, weight and shift");
    if (!p.workspace && linear_norm_workspace_bytes(p.m, p.n) > 0) fail("a workspace");
}

}  // namespace

int64_t linear_norm_workspace_bytes(int64_t m, int64_t n) {
    const Width& width = find_width(n);
    return (m + width.tile_m - 1) / width.tile_m * width.workspace_bytes;
}

void linear_norm(const LinearNormParams& p, const Launch& launch) {
    const Width& width = find_width(p.n);
    check(p);
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    width.launch(p, static_cast<cudaStream_t>(launch.stream));
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
