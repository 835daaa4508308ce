// Linear layers of any size and dtype, whose rows do not depend on each other: f32, and columns or
// features that the tensor-core kernel (linear.cu) does not take, where bits must not depend on the
// batch.
//
//   d = a b^T + bias         a [m, k], b [n, k], d [m, n], f32, f16 or bf16, f32 inside
//
// A CTA of 256 threads has a tile of 64 x 64 of d, a thread 4 x 4 of it; 16 features a step come
// through shared memory. Each element is one chain of fused multiply-adds in the order of k, so
// that no choice by m, n or k exists that could change a bit. Bytes: a once a tile column, b once a
// tile row. Bound by FP32 units; it is for heads of few outputs, and not tuned. Source: standard.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "ops.h"

namespace bytetx {
namespace {

constexpr int kTile = 64;
constexpr int kStep = 16;  // features
constexpr int kOwn = 4;    // rows, and columns, of a thread
constexpr int kSide = kTile / kOwn;
constexpr int kThreads = kSide * kSide;
constexpr int kPitch = kTile + 4;  // 16-byte rows, fewer bank conflicts of the stores

// Rows first .. first + 63 of x [num_rows, k], features at .. at + 15; zeros where there are none.
template <typename T>
__device__ __forceinline__ void load_step(const T* x, int64_t num_rows, int64_t k, int64_t first,
                                          int64_t at, float (&to)[kStep][kPitch]) {
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kStep; i += kThreads) {
        const int row = i / kStep, feature = i % kStep;
        const bool is_there = first + row < num_rows && at + feature < k;
        to[feature][row] =
            is_there ? static_cast<float>(x[(first + row) * k + at + feature]) : 0.0f;
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    linear_any_kernel(const __grid_constant__ LinearAnyParams p) {
    __shared__ __align__(16) float a[kStep][kPitch], b[kStep][kPitch];
    const int64_t m = int64_t{blockIdx.x} * kTile, n = int64_t{blockIdx.y} * kTile;
    const int row = static_cast<int>(threadIdx.x) / kSide * kOwn;
    const int column = static_cast<int>(threadIdx.x) % kSide * kOwn;
    release_next_kernel();
    wait_for_prior_kernel();
    float sums[kOwn][kOwn] = {};
    for (int64_t at = 0; at < p.k; at += kStep) {
        load_step(static_cast<const T*>(p.a), p.m, p.k, m, at, a);
        load_step(static_cast<const T*>(p.b), p.n, p.k, n, at, b);
        __syncthreads();  // both are written
#pragma unroll
        for (int feature = 0; feature < kStep; ++feature) {
            const float4 x = *reinterpret_cast<const float4*>(&a[feature][row]);
            const float4 w = *reinterpret_cast<const float4*>(&b[feature][column]);
            const float of_a[kOwn] = {x.x, x.y, x.z, x.w}, of_b[kOwn] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
#pragma unroll
                for (int j = 0; j < kOwn; ++j) {
                    sums[i][j] = __fmaf_rn(of_a[i], of_b[j], sums[i][j]);
                }
            }
        }
        __syncthreads();  // both have been read
    }
    const T* bias = static_cast<const T*>(p.bias);
    for (int i = 0; i < kOwn; ++i) {
        for (int j = 0; j < kOwn; ++j) {
            if (m + row + i >= p.m || n + column + j >= p.n) continue;
            const float shift = bias ? static_cast<float>(bias[n + column + j]) : 0.0f;
            T* d = static_cast<T*>(p.d) + (m + row + i) * p.n + n + column + j;
            *d = static_cast<T>(__fadd_rn(sums[i][j], shift));
        }
    }
}

}  // namespace

void linear_any(const LinearAnyParams& p, const Launch& launch) {
    constexpr int64_t kMostTiles = 65535;  // limit of a grid's second dimension
    if (p.m < 0 || p.m > INT32_MAX || p.n <= 0 || p.n > kMostTiles * kTile || p.k <= 0) {
        throw std::invalid_argument("linear_any needs 0 <= m < 2^31, 0 < n < 2^22 and k > 0; got " +
                                    std::to_string(p.m) + ", " + std::to_string(p.n) + ", " +
                                    std::to_string(p.k));
    }
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    const dim3 grid(static_cast<unsigned>((p.m + kTile - 1) / kTile),
                    static_cast<unsigned>((p.n + kTile - 1) / kTile));
    const LaunchShape shape{grid, dim3(kThreads), 0, static_cast<cudaStream_t>(launch.stream)};
    dispatch_dtype(p.dtype, [&]<typename T>() { launch_kernel(linear_any_kernel<T>, shape, p); });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
