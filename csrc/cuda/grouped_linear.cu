// Linear layers whose weights are codes of 8 or 4 bits in groups of 32 features.
//
//   d = act(x w^T + bias) + residual        x [m, k], d [m, n], f16 or bf16, f32 sums
//   d = act(x gates^T) * (x values^T)
//
// Three kernels, by rows of x; launch_fastest() chooses:
//   one row     grouped_row_launch.cuh     streams codes of 4 bits; bound by HBM
//   few         grouped_linear_launch.cuh  shares k among the CTAs of a cluster; HBM, decoding
//   many        grouped_tiles_launch.cuh   persistent, 128 or 256 tokens a tile; the matrix unit
//
// In all of them weights are the rows of the matrix unit's operand a, from registers, and x its
// columns: a warp decodes its 16 outputs of a block, 32 numbers a lane, and no weight goes back to
// memory. The codes of the first stages are loaded before the prior kernel has ended. Bytes: codes
// and numbers, 5, 8.5 or 9 bits a weight, once for every tile of tokens (from HBM once).
//
// grouped_rows() writes the matrix, or rows of it, for products of many tokens and for word tables.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/row.cuh"
#include "cuda/grouped_linear_launch.cuh"
#include "cuda/grouped_row_launch.cuh"
#include "cuda/grouped_tiles_launch.cuh"

namespace bytetx {
namespace {

constexpr int kRowThreads = 256;
constexpr int kEight = 8;           // features of a thread
constexpr int kMostFewTokens = 64;  // for which tiles of 128 tokens are too large

template <typename T, grouped::CodeKind kKind>
__global__ void __launch_bounds__(kRowThreads) grouped_rows_kernel(const GroupedRowsParams p) {
    using C = grouped::Codes<kKind>;
    // The next kernel is not released: the rows may be a weight to it, which GEMMs load before they
    // wait.
    wait_for_prior_kernel();
    const int64_t pieces = p.k / kEight;
    const int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
    if (at >= p.num_rows * pieces) return;
    const int64_t row = at / pieces, feature = at % pieces * kEight;
    const int64_t output = p.indices != nullptr ? p.indices[row] : row;
    uint32_t words[4];
    if (output < 0 || output >= p.n) {
        words[0] = words[1] = words[2] = words[3] = 0x7fff7fff;  // NaN
    } else {
        const int64_t blocks_k = (p.k + grouped::kBlockFeatures - 1) / grouped::kBlockFeatures;
        const uint8_t* block = p.codes + (output / grouped::kBlockOutputs * blocks_k +
                                          feature / grouped::kBlockFeatures) *
                                             C::kBytes;
        const int strip =
            static_cast<int>(output % grouped::kBlockOutputs) / grouped::kStripOutputs;
        const int r = static_cast<int>(output % grouped::kStripOutputs), is_second = r / 8;
        const int group = static_cast<int>(feature / grouped::kGroup) % 2;
        const int pair = static_cast<int>(feature / kEight) % 4;
        const uint8_t* numbers =
            block + C::kNumbersAt +
            ((strip * 8 + r % 8) * 4 + group * 2 + is_second) * C::kNumberBytes;
        const float factor = p.factor[output];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int lane = r % 8 * 4 + t;
            uint32_t word;
            const auto* codes = reinterpret_cast<const uint32_t*>(block + strip * C::kStripBytes);
            if constexpr (C::kBits == 4) {
                word = grouped::weights_of4<T, has_zero_points(kKind)>(
                    codes[lane * 4 + group * 2 + is_second], pair,
                    *reinterpret_cast<const uint32_t*>(numbers));
            } else {
                const uint32_t four = codes[(group * 32 + lane) * 4 + is_second * 2 + pair / 2];
                if constexpr (numbers_of(kKind) == 2) {
                    const auto own = grouped::Numbers8<T>::of(
                        *reinterpret_cast<const uint32_t*>(numbers), p.form);
                    word = own.weights(four, pair);
                } else {
                    word = grouped::weights_of8<T>(
                        four, pair, *reinterpret_cast<const uint16_t*>(numbers), false);
                }
            }
            const float2 two = gemm::unpack(word, T{});
            words[t] = gemm::pack(two.x * factor, two.y * factor, T{});
        }
    }
    static_cast<uint4*>(p.out)[at] = {words[0], words[1], words[2], words[3]};
    __threadfence();
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA will read them
}

void check_codes(int32_t bits, GroupForm form, DType dtype) {
    if (dtype == DType::f32 || (bits != 4 && bits != 8)) {
        throw std::invalid_argument("codes have 4 or 8 bits and rows are f16 or bf16, got " +
                                    std::to_string(bits) + " bits");
    }
    const bool has_both = form == GroupForm::least || form == GroupForm::zero;
    if (bits == 4 && !has_both) {
        throw std::invalid_argument("groups of 4-bit codes have least values or zero points");
    }
}

void check_sizes(const char* op, int64_t m, int64_t n, int64_t k) {
    if (m >= 0 && m <= INT32_MAX && n > 0 && n <= INT32_MAX / 64 && k > 0 && k % kEight == 0 &&
        k <= INT32_MAX) {
        return;
    }
    throw std::invalid_argument(std::string(op) +
                                " needs 0 <= m < 2^31, 0 < n < 2^25 and k > 0 with k % 8 == 0; "
                                "got " +
                                std::to_string(m) + ", " + std::to_string(n) + ", " +
                                std::to_string(k));
}

// Pairs of tiles of outputs that are multiplied with 256 tokens a tile, and those behind them with
// 128; none: by the kernel for few tokens.
struct TilePlan {
    int large, small;
};

// By what an H200 took. The unit is the time that a block of features takes the kernel for few
// tokens, about 0.43 us. Where the last wave of large tiles is of few, small ones take its place.
TilePlan plan_tiles(const GroupedLinearParams& p) {
    if (p.m <= kMostFewTokens || p.n % grouped::kStripOutputs != 0) return {};
    const int pairs = gemm::num_tiles(p.n, grouped::kPairOutputs);
    if (p.tile != 0) return p.tile == 256 ? TilePlan{pairs, 0} : TilePlan{0, pairs};
    const int blocks = gemm::num_tiles(p.k, grouped::kBlockFeatures), sms = num_sms();
    double least = 1e30;
    TilePlan best{};
    const auto consider = [&](TilePlan plan, double time) {
        if (time < least) best = plan, least = time;
    };
    const int tiles = gemm::num_tiles(p.m, 128) * gemm::num_tiles(p.n, grouped::kGroupedOutputs);
    for (int sharers = 1; sharers <= grouped::kMaxSharers; ++sharers) {
        const int waves = gemm::num_tiles(int64_t{tiles} * sharers, sms);
        if (sharers > 1 && waves > 1) break;
        const double shared = sharers > 1 ? 6 + sharers : 0;
        consider({}, waves * (gemm::num_tiles(blocks, sharers) + 8) + shared);
    }
    const int large_m = gemm::num_tiles(p.m, 256), small_m = gemm::num_tiles(p.m, 128);
    const int at_once = sms / 2, waves = gemm::num_tiles(int64_t{large_m} * pairs, at_once);
    for (const int large_waves : {waves, waves - 1, 0}) {
        const int large = std::min(pairs, large_waves * at_once / large_m), small = pairs - large;
        const int small_waves = gemm::num_tiles(int64_t{small_m} * small, at_once);
        double time = large_waves * (1.5 * blocks + 13);
        if (small > 0) time += small_waves * (0.88 * blocks + 7) + 5;
        consider({large, small}, time);
    }
    return best;
}

template <typename T, grouped::CodeKind kKind>
void launch_fastest(const GroupedLinearParams& p, cudaStream_t stream) {
    if constexpr (grouped::bits_of(kKind) == 4) {
        if (p.m == 1 && grouped::row_fits<kKind>(p.k, p.gated)) {
            return grouped::launch_grouped_row<T, kKind>(p, stream);
        }
    }
    const auto [large, small] = plan_tiles(p);
    if (large + small == 0) return grouped::launch_grouped<T, kKind>(p, stream);
    if (large > 0) grouped::launch_grouped_tiles<T, kKind>(p, 256, {0, large}, stream);
    if (small > 0) {
        grouped::launch_grouped_tiles<T, kKind>(p, 128, {large, large + small}, stream);
    }
}

}  // namespace

void grouped_linear(const GroupedLinearParams& p, const Launch& launch) {
    check_codes(p.bits, p.form, p.dtype);
    check_sizes("grouped_linear", p.m, p.n, p.k);
    if (p.gated && (p.n % 64 != 0 || p.residual != nullptr)) {
        throw std::invalid_argument("gated rows have n % 64 == 0 and no residual, got n = " +
                                    std::to_string(p.n));
    }
    if (p.tile != 0 && p.tile != 128 && p.tile != 256) {
        throw std::invalid_argument("tiles have 128 or 256 tokens, got " + std::to_string(p.tile));
    }
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    grouped::dispatch_kind(p.bits, p.form, [&]<grouped::CodeKind kKind>() {
        p.dtype == DType::f16 ? launch_fastest<Half, kKind>(p, stream)
                              : launch_fastest<BFloat16, kKind>(p, stream);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

void grouped_rows(const GroupedRowsParams& p, const Launch& launch) {
    check_codes(p.bits, p.form, p.dtype);
    check_sizes("grouped_rows", p.num_rows, p.n, p.k);
    if (p.num_rows == 0) return;
    const DeviceGuard guard(launch.device);
    const int64_t ctas = (p.num_rows * (p.k / kEight) + kRowThreads - 1) / kRowThreads;
    const LaunchShape shape{dim3(static_cast<unsigned>(ctas)), dim3(kRowThreads), 0,
                            static_cast<cudaStream_t>(launch.stream)};
    const auto run = [&]<typename T>() {
        grouped::dispatch_kind(p.bits, p.form, [&]<grouped::CodeKind kKind>() {
            launch_kernel(grouped_rows_kernel<T, kKind>, shape, p);
        });
    };
    p.dtype == DType::f16 ? run.template operator()<Half>() : run.template operator()<BFloat16>();
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
