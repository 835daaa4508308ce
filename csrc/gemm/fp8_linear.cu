// Linear layers of E4M3 rows: scales, bias, activation, and E4M3 rows again.
//
//   d = act(a_scale b_scale (a b^T) + bias)        a [m, k], b [n, k] E4M3; d [m, n] f16 or bf16,
//   d = e4m3(act(...) / d_scale)                   or E4M3 with one scale for all,
//   d = act(gates) values                          or of rows of b in turn, 32 of each
//
// The kernel is gemm/kernel.cuh with gemm/fp8_epilogue.cuh: persistent, two warpgroups that
// alternate, each on its own tiles, one's end of a tile under the other's products; for few rows a
// CTA has one tile, whose weights are under way before the kernel before has ended. Accumulators
// grow in the matrix unit from the first feature to the last: it keeps about 14 bits of each
// addition, which is far below what rounding operands to E4M3 has cost (docs/kernels/fp8-linear.md
// has both). Bound by the matrix unit and its power.
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
    void (*launch)(const Fp8LinearParams&, cudaStream_t);
};

template <typename Tile>
constexpr Entry entry(const char* name, bool is_small_m) {
    return {gemm::tiling_of<Tile>(name, is_small_m), gemm::launch_fp8_linear<Tile>};
}

constexpr Entry kEntries[] = {
    entry<gemm::Fp8Tile128x128>("128x128single", false),
    entry<gemm::Fp8Tile64x128>("64x128single", false),
    entry<gemm::SmallM128x64>("128x64", true),
    entry<gemm::SmallM64x64>("64x64", true),
};
constexpr int kNumEntries = sizeof(kEntries) / sizeof(Entry);

void check(const Fp8LinearParams& p) {
    const auto fail = [&](const char* need) {
        throw std::invalid_argument("fp8_linear needs " + std::string(need) +
                                    "; got m, n, k = " + std::to_string(p.m) + ", " +
                                    std::to_string(p.n) + ", " + std::to_string(p.k));
    };
    if (p.m < 0 || p.m > INT32_MAX) fail("0 <= m < 2^31");
    if (p.n <= 0 || p.n % 32 != 0 || p.n > INT32_MAX / 192) fail("0 < n < 2^23 and n % 32 == 0");
    if (p.k <= 0 || p.k % 16 != 0 || p.k > INT32_MAX) fail("k > 0 and k % 16 == 0");
    if (p.dtype == DType::f32) fail("f16 or bf16");
    if (p.is_d_fp8 && !(p.d_scale > 0)) fail("d_scale > 0");
    if (!p.gated) return;
    if (p.n % 64 != 0 || p.is_d_fp8) fail("n % 64 == 0 and f16 or bf16 results, gated");
    if (p.activation != Activation::gelu && p.activation != Activation::gelu_tanh &&
        p.activation != Activation::silu) {
        fail("gelu, gelu_tanh or silu, gated");
    }
}

}  // namespace

int32_t num_fp8_linear_tilings() { return kNumEntries; }

LinearTiling fp8_linear_tiling(int32_t index) {
    if (index < 0 || index >= kNumEntries) {
        throw std::invalid_argument("fp8_linear has tilings 0 to " +
                                    std::to_string(kNumEntries - 1) + ", got " +
                                    std::to_string(index));
    }
    return kEntries[index].tiling;
}

void fp8_linear(const Fp8LinearParams& p, const Launch& launch) {
    check(p);
    fp8_linear_tiling(p.tiling);
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    kEntries[p.tiling].launch(p, static_cast<cudaStream_t>(launch.stream));
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
