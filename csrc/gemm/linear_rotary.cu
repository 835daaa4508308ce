// The linear layer that gives q, k and v, with the rotation of q's and k's heads in its epilogue.
//
//   d = rotate(a b^T + bias)         a [m, k], b [n, k], d [m, n], f16 or bf16, f32 inside
//
// gemm/kernel.cuh with gemm/rotary_epilogue.cuh, in linear()'s tilings for many rows. It saves the
// pass of cuda/rotary_kv.cu over q and k: a read and a write of two thirds of d. docs/kernels/
// linear.md says what it takes. Source: RoFormer (arXiv 2104.09864), section 3.2.
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/check.cuh"
#include "gemm/launch.cuh"
#include "gemm/rotary_epilogue.cuh"
#include "linear_rotary_ops.h"

namespace bytetx {
namespace {

constexpr int kHeadDim = 64;

void check(const LinearRotaryParams& p) {
    const auto fail = [&](const char* need) {
        throw std::invalid_argument("linear_rotary needs " + std::string(need) +
                                    "; got m, n, k = " + std::to_string(p.m) + ", " +
                                    std::to_string(p.n) + ", " + std::to_string(p.k));
    };
    if (p.m < 0 || p.m > INT32_MAX || p.n <= 0 || p.n > INT32_MAX) fail("0 <= m and 0 < n < 2^31");
    if (p.n % kHeadDim != 0) fail("n % 64 == 0");
    if (p.k <= 0 || p.k % 8 != 0 || p.k > INT32_MAX) fail("k > 0 and k % 8 == 0");
    if (p.dtype == DType::f32) fail("f16 or bf16");
    if (p.rotated_columns < 0 || p.rotated_columns > p.n || p.rotated_columns % kHeadDim != 0) {
        fail("0 <= rotated_columns <= n and rotated_columns % 64 == 0");
    }
}

template <typename T, typename Tile>
void launch(const LinearRotaryParams& p, cudaStream_t stream) {
    using C = gemm::Config<T, Tile>;
    using K =
        gemm::Kernel<C, gemm::RasterScheduler, gemm::DenseProducer<C>, gemm::RotaryEpilogue<C>>;
    LinearParams o{};
    o.a = p.a, o.b = p.b, o.bias = p.bias, o.d = p.d;
    o.m = p.m, o.n = p.n, o.k = p.k, o.dtype = p.dtype;
    typename K::Params params{};
    static_cast<gemm::Problem&>(params) = gemm::make_problem<C>(o);
    params.scheduler = gemm::choose_raster<C>(params, gemm::kRasterRows);
    static_cast<gemm::LinearInputs&>(params.epilogue) = gemm::LinearInputs::of(o);
    params.epilogue.cos = p.cos, params.epilogue.sin = p.sin;
    params.epilogue.position_ids = p.position_ids;
    params.epilogue.rotated_columns = p.rotated_columns;
    gemm::launch_persistent<K>(params, stream);
}

template <typename Tile>
void launch(const LinearRotaryParams& p, cudaStream_t stream) {
    if (p.dtype == DType::f16) return launch<Half, Tile>(p, stream);
    launch<BFloat16, Tile>(p, stream);
}

}  // namespace

void linear_rotary(const LinearRotaryParams& p, const Launch& launch_on) {
    check(p);
    const std::string_view tiling = linear_tiling(p.tiling).name;
    if (p.m == 0) return;
    const DeviceGuard guard(launch_on.device);
    const auto stream = static_cast<cudaStream_t>(launch_on.stream);
    if (tiling == "128x192") {
        launch<gemm::Tile128x192>(p, stream);
    } else if (tiling == "192x128") {
        launch<gemm::Tile192x128>(p, stream);
    } else if (tiling == "128x128") {
        launch<gemm::Tile128x128>(p, stream);
    } else {
        throw std::invalid_argument("linear_rotary has no tiling " + std::string(tiling));
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
