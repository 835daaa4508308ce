// The kernels behind layer_norm, rms_norm and quantize_rows: norms of rows in memory, with the
// addition before them and the E4M3 copy after them.
//
//   h = x + residual;  sum_out = h;  out = norm(h) * weight + bias;  out_fp8 = e4m3(out /
//   out_scale)
//
// x, residual, sum_out, out [total_tokens, hidden_size] and weight, bias [hidden_size], all of one
// dtype (f32, f16, bf16); h and the statistics are f32, and what is stored is rounded once.
//
// norm_rows_kernel: rows whose bytes are a multiple of 16. A row lives in the registers of one
// warp (up to 1024 features; 4 rows a CTA, no shared memory, no barrier), of half a warp (384 f16
// or bf16) or of one CTA of 256 threads (up to 16384 f16 or bf16, 8192 f32; quantize_rows has 512
// threads for rows of up to twice that). Neighbouring threads hold neighbouring 16 bytes. A warp
// takes row after row, keeps weight and bias in registers, and loads a row while it computes the
// one before; where rows are very many or few, launch_full_rows() has other ways.
// norm_any_rows_kernel: every other size; one CTA a row, element by element, three passes of which
// the last two come from cache.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/row_norm.cuh"
#include "ops.h"

namespace bytetx {

// How rows go through a kernel. any: sizes up to what the tiling holds. full: rows that fill their
// registers, so that every bound is known. once: the same, each warp with one row, no E4M3.
enum class RowWay { any, full, once };

// Parameters in registers are loaded before the kernel before has ended, and beside the row.
template <typename Tiling>
constexpr bool kKeepsParameters = Tiling::kVecsPerThread <= 4;

template <typename T, typename Tiling, RowNorm kNorm, RowWay kWay>
__global__ void __launch_bounds__(Tiling::kCtaThreads, 1)
    norm_rows_kernel(const __grid_constant__ NormParams p, const bool streams) {
    const int64_t hidden_size = kWay == RowWay::any ? p.hidden_size : kFullRow<T, Tiling>;
    const int num_vecs = static_cast<int>(hidden_size / kVecSize<T>);
    const int lane = static_cast<int>(threadIdx.x % Tiling::kThreadsPerRow);
    release_next_kernel();
    using Parameter = RowParameter<Tiling, kKeepsParameters<Tiling>>;
    const Parameter weight(p.weight, lane, num_vecs);
    const Parameter bias(p.bias, lane, num_vecs);
    const int64_t stride = int64_t{gridDim.x} * Tiling::kRowsPerCta;
    const int place = static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
    const int mate = place % Tiling::kRowsPerWarp;  // which of the warp's rows this thread has
    int64_t first = int64_t{blockIdx.x} * Tiling::kRowsPerCta + place - mate;
    // Where the last row has no mate, both halves of its warp compute it and store the same.
    const auto own_row = [&] { return min(first + mate, p.total_tokens - 1); };
    const uint64_t policy = first_out_policy();
    wait_for_prior_kernel();

    RawRow<Tiling> x;
    RawRow<Tiling> residual;
    const auto last = [&](const uint4* at) { return load_last(at, policy); };
    const auto load = [&] {
        if (first >= p.total_tokens) return;
        const int64_t row = own_row();
        if (p.residual == nullptr) return x.load(p.x, row, lane, num_vecs, load_once);
        x.load(p.x, row, lane, num_vecs, last);  // the sum takes the place of both
        residual.load(p.residual, row, lane, num_vecs, last);
    };
    load();
    while (first < p.total_tokens) {  // whole warps: a tiling with barriers has one row a CTA
        const int64_t row = own_row();
        RowRegisters<T, Tiling> h;
#pragma unroll
        for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
            for (int j = 0; j < kVecSize<T>; ++j) {
                h[i][j] = element<T>(x.words[i], j);
                if constexpr (kNorm != RowNorm::none) h[i][j] += element<T>(residual.words[i], j);
            }
        }
        first += stride;
        if constexpr (kWay != RowWay::once) load();
        if (p.sum_out != nullptr) store_row<T, Tiling>(p.sum_out, h, lane, row, num_vecs);
        uint8_t* out_fp8 = kWay == RowWay::once ? nullptr : p.out_fp8;
        store_normalized_row<T, Tiling, kNorm>(h, lane, row, weight, bias, hidden_size, p.eps,
                                               {p.out, out_fp8, p.out_scale, streams});
        if constexpr (kWay == RowWay::once) return;
    }
}

template <typename T, RowNorm kNorm>
__global__ void __launch_bounds__(kCtaThreads)
    norm_any_rows_kernel(const __grid_constant__ NormParams p) {
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t first = int64_t{blockIdx.x} * p.hidden_size;
    const T* x = static_cast<const T*>(p.x) + first;
    const T* residual = static_cast<const T*>(p.residual);
    T* out = static_cast<T*>(p.out) + first;
    T* sum_out = static_cast<T*>(p.sum_out);
    if (residual != nullptr) residual += first;
    if (sum_out != nullptr) sum_out += first;
    const auto load_h = [&](int64_t i) {
        return static_cast<float>(x[i]) + (residual ? static_cast<float>(residual[i]) : 0.0f);
    };
    const auto store = [&](int64_t i, float value) {
        if (sum_out != nullptr) sum_out[i] = static_cast<T>(load_h(i));
        out[i] = static_cast<T>(value);
    };
    norm_any_row<T, kNorm>(load_h, p.weight, p.bias, p.hidden_size, p.eps, store);
}

inline void check_norm(const char* op, const NormParams& p) {
    if (p.total_tokens < 0 || p.total_tokens > INT32_MAX || p.hidden_size <= 0) {
        throw std::invalid_argument(
            std::string(op) + " needs 0 <= total_tokens < 2^31, hidden_size > 0; got " +
            std::to_string(p.total_tokens) + " and " + std::to_string(p.hidden_size));
    }
}

template <typename T, typename Tiling, RowNorm kNorm, RowWay kWay>
void launch_rows(const NormParams& p, const Launch& launch, cudaStream_t stream) {
    const auto kernel = norm_rows_kernel<T, Tiling, kNorm, kWay>;
    int64_t grid = (p.total_tokens + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
    if constexpr (kWay != RowWay::once) {
        static const int64_t resident =
            resident_ctas(kernel, Tiling::kCtaThreads, 0, launch.device);
        grid = std::min(grid, resident);
    }
    launch_kernel(kernel, {dim3(static_cast<unsigned>(grid)), dim3(Tiling::kCtaThreads), 0, stream},
                  p, is_beyond_l2(p.total_tokens * p.hidden_size * sizeof(T), launch.device));
}

// Rows that fill the registers of Tiling. Few of them have a CTA each, a vector a thread: 1.5 us
// for 256 of 1024 bf16 with their sums, 1.6 by a warp each. Where results are much of what L2 holds
// there are two warps' rows a CTA, and as many CTAs as that takes: 38.3 us for 32k of 768 f16 with
// residual, 39.7 one after another, 40.8 a warp a CTA; fewer ones are faster one after another
// (H200). A row's bits are the same in each way (see sum_row).
template <typename T, typename Tiling, RowNorm kNorm>
void launch_full_rows(const NormParams& p, const Launch& launch, cudaStream_t stream) {
    constexpr int kMaxRowsSmallCta = 264;     // two CTAs an SM of an H200
    constexpr int64_t kManyBytes = 20 << 20;  // 20 MB of the 50 that its L2 has
    if constexpr (kNorm != RowNorm::none && Tiling::kThreadsPerRow <= kWarpSize) {
        if (p.out_fp8 == nullptr) {
            if constexpr (Tiling::kThreadsPerRow == kWarpSize && Tiling::kVecsPerThread > 1) {
                using Few = SpreadTiling<Tiling::kVecsPerThread>;
                if (p.total_tokens <= kMaxRowsSmallCta) {
                    return launch_rows<T, Few, kNorm, RowWay::once>(p, launch, stream);
                }
            }
            if (p.total_tokens * p.hidden_size * int64_t{sizeof(T)} > kManyBytes) {
                using Many = RowTiling<Tiling::kThreadsPerRow, 2 * Tiling::kRowsPerWarp,
                                       Tiling::kVecsPerThread>;
                return launch_rows<T, Many, kNorm, RowWay::once>(p, launch, stream);
            }
        }
    }
    launch_rows<T, Tiling, kNorm, RowWay::full>(p, launch, stream);
}

template <typename T, RowNorm kNorm>
bool launch_in_registers(const NormParams& p, const Launch& launch, cudaStream_t stream) {
    if (!fits_vecs<T>(p.hidden_size, p.x, p.residual, p.out, p.sum_out, p.weight, p.bias,
                      p.out_fp8)) {
        return false;
    }
    const bool fits = dispatch_packed_row_tiling<T>(p.hidden_size, [&]<typename Tiling>() {
        if (p.hidden_size == kFullRow<T, Tiling>) {
            return launch_full_rows<T, Tiling, kNorm>(p, launch, stream);
        }
        launch_rows<T, Tiling, kNorm, RowWay::any>(p, launch, stream);
    });
    if constexpr (kNorm == RowNorm::none) {  // inner rows of feed-forward layers
        using Wide = RowTiling<2 * kCtaThreads, 1, 8>;
        if (!fits && p.hidden_size <= kFullRow<T, Wide>) {
            launch_rows<T, Wide, kNorm, RowWay::any>(p, launch, stream);
            return true;
        }
    }
    return fits;
}

// Every row kernel of one op; kNorm says which.
template <RowNorm kNorm>
void launch_norm(const char* op, const NormParams& p, const Launch& launch) {
    check_norm(op, p);
    if (p.total_tokens == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        if (launch_in_registers<T, kNorm>(p, launch, stream)) return;
        if (p.out_fp8 != nullptr || kNorm == RowNorm::none) {
            throw std::invalid_argument(std::string(op) +
                                        ": E4M3 rows need a multiple of 16 bytes, at most " +
                                        std::to_string(kNorm == RowNorm::none ? 64 : 32) +
                                        " KB; got hidden_size " + std::to_string(p.hidden_size));
        }
        if constexpr (kNorm != RowNorm::none) {
            launch_kernel(
                norm_any_rows_kernel<T, kNorm>,
                {dim3(static_cast<unsigned>(p.total_tokens)), dim3(kCtaThreads), 0, stream}, p);
        }
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
