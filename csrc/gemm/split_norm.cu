// A linear layer of few rows, the residual behind it and their norm, in two kernels.
//
//   h = a b^T + bias + residual;  sum_out = h;  d = norm(h) * weight + shift
//
// With few rows tiles are fewer than SMs, and several CTAs share k of a tile. Each
// stores its part in f32 (gemm/parts.cuh; gemm/kernel.cuh is the kernel), and the norm, which would
// follow anyway, adds up the parts from L2 (cuda/norm_parts.cuh), always in the same order. h is
// not rounded before it is normalized.
//
// Bytes beside the operands': 8 * split_k * m * n, in L2. Bound by latency and the bytes that an SM
// takes in from L2; docs/kernels/linear.md says what it takes. Source: standard split-k.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/check.cuh"
#include "cuda/norm_parts.cuh"
#include "gemm/split_norm_launch.cuh"

namespace bytetx {
namespace {

constexpr int64_t kMostColumns = 8192;

void check(const SplitNormParams& p) {
    const auto fail = [&](const char* need) {
        throw std::invalid_argument("split_norm needs " + std::string(need) +
                                    "; got m, n, k = " + std::to_string(p.m) + ", " +
                                    std::to_string(p.n) + ", " + std::to_string(p.k));
    };
    if (p.m < 0 || p.m > INT32_MAX) fail("0 <= m < 2^31");
    if (p.n <= 0 || p.n > kMostColumns || p.n % gemm::kPermutedRows != 0) {
        fail("0 < n <= 8192 and n % 32 == 0");
    }
    if (p.k <= 0 || p.k % 8 != 0 || p.k > INT32_MAX) fail("k > 0 and k % 8 == 0");
    if (p.split_k < 1) fail("split_k >= 1");
    if (p.is_rms && p.shift != nullptr) fail("no shift with an RMS norm");
    if (p.dtype == DType::f32) fail("f16 or bf16");
}

struct Entry {
    std::string_view tiling;
    void (*launch)(const SplitNormParams&, int, cudaStream_t);
};

constexpr Entry kEntries[] = {
    {"small-m-64x32", gemm::launch_parts<gemm::SmallM64x32>},
    {"small-m-64x64", gemm::launch_parts<gemm::SmallM64x64>},
    {"small-m-64x96", gemm::launch_parts<gemm::SmallM64x96>},
    {"small-m-128x32", gemm::launch_parts<gemm::SmallM128x32>},
    {"small-m-128x64", gemm::launch_parts<gemm::SmallM128x64>},
    {"small-m-128x96", gemm::launch_parts<gemm::SmallM128x96>},
    {"small-m-128x128", gemm::launch_parts<gemm::SmallM128x128>},
};

const Entry& find_entry(std::string_view tiling) {
    for (const Entry& entry : kEntries) {
        if (entry.tiling == tiling) return entry;
    }
    throw std::invalid_argument("split_norm has no tiling " + std::string(tiling));
}

}  // namespace

void split_norm(const SplitNormParams& p, const Launch& launch) {
    check(p);
    const Entry& entry = find_entry(linear_tiling(p.tiling).name);
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    const int num_parts = std::min(p.split_k, gemm::num_tiles(p.k, gemm::kBlockK));
    entry.launch(p, num_parts, stream);
    if (p.dtype == DType::f16) {
        gemm::norm_parts<__half>(p, num_parts, stream);
    } else {
        gemm::norm_parts<__nv_bfloat16>(p, num_parts, stream);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
