// The end of a tile of the FP8 GEMM: scales, bias, activation, and rounding to Out.
//
// A thread's sums lie as in linear_epilogue.cuh. It goes through them by groups of columns, so that
// what belongs to columns is read once for all of its rows.
#pragma once

#include <cuda_fp8.h>

#include "cuda/linear_epilogue.cuh"

namespace bytetx::gemm {

// Features in the tensor maps of `Params` are pairs of E4M3; its bias and residual are null.
struct Fp8Params : Params {
    const float* a_scale;     // [m], or null for ones
    const float* b_scale;     // [n]
    const float* float_bias;  // [n], or null for zeros
    float inverse_d_scale;    // E4M3: what act() is multiplied by before it is rounded
};

// gelu_erf() for results that become E4M3, which is a 16th of their value off: a polynomial of
// degree 3 leaves 1/370 of the value, below 1e-3 4e-4. Its leading coefficient is negative, so z
// needs no bound.
__device__ __forceinline__ float gelu_erf_coarse(float x) {
    const float z = fabsf(x);
    float positive;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
    float log2_tail = fmaf(z, -0.01849038f, -0.52088085f);
    log2_tail = fmaf(log2_tail, z, -1.1127225f);
    log2_tail = fmaf(log2_tail, z, -1.00385553f);
    return fmaf(-z, exp2_approx(log2_tail), positive);
}

template <typename C, Epilogue kEpilogue, typename Out>
struct Fp8TileEpilogue {
    static constexpr int kRowsOfThread = 2 * C::kRowBlocks;
    static constexpr int kColumnGroups = C::kTileN / kPermutedRows;
    static constexpr bool kIsFp8 = sizeof(Out) == 1;
    struct Columns {
        float scale[8], bias[8];
    };
    static_assert(C::kRowBlocks * C::kTileN <= 256, "sums leave no room for Columns");
    const Fp8Params& p;
    int m, n;  // first row, first column
    int lane = static_cast<int>(threadIdx.x) % 32;
    int first_row = m + static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16 + lane / 4;
    int first_column = n + lane % 4 * 8;
    float row_scale[kRowsOfThread] = {};
    Columns columns[kColumnGroups] = {};

    __device__ __forceinline__ int row(int i) const { return first_row + i / 2 * 64 + i % 2 * 8; }

    // Sum e (of 8) of the thread's row i and column group q.
    __device__ __forceinline__ static constexpr int at(int i, int q, int e) {
        return i / 2 * (C::kTileN / 2) + 16 * q + e / 2 * 4 + i % 2 * 2 + e % 2;
    }

    __device__ __forceinline__ bool has_group(int q) const { return n + q * kPermutedRows < p.n; }

    // Before the products, so that nothing is waited for after them. Addresses outside are moved
    // inside instead of skipped: a branch around each load would let them come one by one.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            row_scale[i] = p.a_scale == nullptr ? 1.0f : p.a_scale[min(row(i), p.m - 1)];
        }
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
            const int column = first_column + (has_group(q) ? q * kPermutedRows : 0);
            load_eight(columns[q].scale, p.b_scale + column);
            if (p.float_bias != nullptr) load_eight(columns[q].bias, p.float_bias + column);
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ void store(const Accumulators& sums) const {
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
            const Columns& group = columns[q];
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                float x[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] = fmaf(sums(at(i, q, e)) * row_scale[i], group.scale[e], group.bias[e]);
                }
                if (row(i) < p.m && has_group(q)) store_eight(x, i, q);
            }
        }
    }

    __device__ __forceinline__ static void load_eight(float (&x)[8], const float* from) {
        const float4 low = __ldg(reinterpret_cast<const float4*>(from));
        const float4 high = __ldg(reinterpret_cast<const float4*>(from + 4));
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }

    __device__ __forceinline__ void store_eight(const float (&x)[8], int i, int q) const {
        Out* out = static_cast<Out*>(p.d) + int64_t{m} * p.n +
                   ((row(i) - m) * p.n + first_column + q * kPermutedRows);
        if constexpr (kIsFp8) {
            uint32_t words[2];
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const uint32_t low = fp8_pair(x[4 * w], x[4 * w + 1]);
                words[w] = low | fp8_pair(x[4 * w + 2], x[4 * w + 3]) << 16;
            }
            *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
        } else {
            uint32_t words[4];
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                words[e / 2] = pack(activate<kEpilogue>(x[e], p.activation),
                                    activate<kEpilogue>(x[e + 1], p.activation), Out{});
            }
            *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    __device__ __forceinline__ uint32_t fp8_pair(float low, float high) const {
        const float2 pair = make_float2(quantized(low), quantized(high));
        return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }

    __device__ __forceinline__ float quantized(float x) const {
        if constexpr (kEpilogue == Epilogue::erf) return gelu_erf_coarse(x) * p.inverse_d_scale;
        return activate<kEpilogue>(x, p.activation) * p.inverse_d_scale;
    }
};

}  // namespace bytetx::gemm
