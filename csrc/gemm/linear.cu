// Linear layers with a fused epilogue: bias, activation, residual, gates.
//
//   d = act(a b^T + bias + residual)         a [m, k], b [n, k], d [m, n], f16 or bf16, f32 inside
//
// The kernel is gemm/kernel.cuh's, in several tilings. For large m: persistent, two warpgroups that
// alternate (ping-pong), each on its own tiles; bound by the tensor cores and the power they draw.
// For small m: one tile a cluster, whose CTAs split k; bound by latency and the bytes of the
// weights. The caller chooses (bytetx/ops/linear_plan.py has the table).
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "gemm/launchers.h"
#include "gemm/tilings.cuh"

namespace bytetx {
namespace {

struct Entry {
    LinearTiling tiling;
    void (*launch)(const LinearParams&, cudaStream_t);
};

template <typename Tile>
constexpr Entry entry(const char* name) {
    return {gemm::tiling_of<Tile>(name, Tile::kIsForSmallM), gemm::launch_linear<Tile>};
}

constexpr Entry kEntries[] = {
    entry<gemm::Tile128x192>("128x192"),
    entry<gemm::Tile192x128>("192x128"),
    entry<gemm::Tile128x128>("128x128"),
    entry<gemm::Tile192x128Single>("192x128-single"),
    entry<gemm::SmallM64x32>("small-m-64x32"),
    entry<gemm::SmallM64x64>("small-m-64x64"),
    entry<gemm::SmallM64x96>("small-m-64x96"),
    entry<gemm::SmallM128x64>("small-m-128x64"),
    entry<gemm::SmallM128x96>("small-m-128x96"),
    entry<gemm::SmallM128x128>("small-m-128x128"),
    entry<gemm::SmallM192x128>("small-m-192x128"),
    entry<gemm::SmallM128x32>("small-m-128x32"),
    entry<gemm::SmallM64x64Pair>("small-m-64x64-pair"),
    entry<gemm::SmallM128x64Pair>("small-m-128x64-pair"),
    entry<gemm::SmallM128x128Pair>("small-m-128x128-pair"),
};
constexpr int kNumEntries = sizeof(kEntries) / sizeof(Entry);

void check(const LinearParams& p) {
    const auto fail = [&](const char* need) {
        throw std::invalid_argument("linear needs " + std::string(need) +
                                    "; got m, n, k = " + std::to_string(p.m) + ", " +
                                    std::to_string(p.n) + ", " + std::to_string(p.k));
    };
    if (p.m < 0 || p.m > INT32_MAX || p.n <= 0 || p.n > INT32_MAX) fail("0 <= m and 0 < n < 2^31");
    if (p.n % (p.gated ? 64 : 32) != 0) fail("n % 32 == 0 (gated: n % 64 == 0)");
    if (p.k <= 0 || p.k % 8 != 0 || p.k > INT32_MAX) fail("k > 0 and k % 8 == 0");
    if (p.dtype == DType::f32) fail("f16 or bf16");
    if (p.split_k < 1 || p.split_k > 8) fail("1 to 8 split_k");
    if (p.residual && (p.gated || p.activation != Activation::none)) {
        fail("no residual beside an activation or gates");
    }
    const bool is_smooth = p.activation == Activation::gelu || p.activation == Activation::silu ||
                           p.activation == Activation::gelu_tanh;
    if (p.gated && !is_smooth) fail("gelu, gelu_tanh or silu where it is gated");
}

}  // namespace

int32_t num_linear_tilings() { return kNumEntries; }

LinearTiling linear_tiling(int32_t index) {
    if (index < 0 || index >= kNumEntries) {
        throw std::invalid_argument("linear has tilings 0 to " + std::to_string(kNumEntries - 1) +
                                    ", got " + std::to_string(index));
    }
    return kEntries[index].tiling;
}

void linear(const LinearParams& p, const Launch& launch) {
    check(p);
    linear_tiling(p.tiling);
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    kEntries[p.tiling].launch(p, static_cast<cudaStream_t>(launch.stream));
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
