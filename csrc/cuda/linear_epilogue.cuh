// The two ends of a tile in registers: bias and residual go in before the products, activation and
// rounding come after them.
//
// Registers of a thread, for each 64 rows of the warpgroup: rows 16 * warp + lane / 4 and + 8; of
// every 32 columns the eight from 8 * (lane % 4) on (see kPermutedRows).
// Gated: of every 64 columns of sums the first 32 are gates, the others their values, and the
// result has 32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x * Phi(x) = max(x, 0) - z * Phi(-z) with z = |x|. log2 of Phi(-z) is nearly a parabola: a
// polynomial of degree 7, fitted on [0, 6.2] to the result's error in f16 (at most 3e-7, 0.8 % of
// half an ulp), falls on beyond. NaN stays NaN, infinities give what they should.
__device__ __forceinline__ float gelu_erf(float x) {
    float z, positive;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(fabsf(x)), "f"(16.0f));
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
    float log2_tail = fmaf(z, -9.49181142e-07f, 4.83114799e-05f);
    log2_tail = fmaf(log2_tail, z, -8.53212232e-04f);
    log2_tail = fmaf(log2_tail, z, 8.28841711e-03f);
    log2_tail = fmaf(log2_tail, z, -5.36470223e-02f);
    log2_tail = fmaf(log2_tail, z, -4.58670703e-01f);
    log2_tail = fmaf(log2_tail, z, -1.15120256e+00f);
    log2_tail = fmaf(log2_tail, z, -9.99996832e-01f);
    return fmaf(-z, exp2_approx(log2_tail), positive);
}

template <Epilogue kEpilogue>
__device__ __forceinline__ float activate(float x, const ActivationConstants& c) {
    if constexpr (kEpilogue == Epilogue::erf) return gelu_erf(x);
    if constexpr (kEpilogue == Epilogue::sigmoid) {
        const float z = x * fmaf(c.scale_cubed, x * x, c.scale);
        const float sigmoid = reciprocal_approx(1.0f + exp2_approx(-z));
        return fmaf(sigmoid, fmaf(c.times_x, x, c.times_one), c.offset);
    }
    return x < c.floor ? c.floor : x;  // NaN stays NaN
}

__device__ __forceinline__ float2 unpack(uint32_t word, cutlass::half_t) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
}

__device__ __forceinline__ float2 unpack(uint32_t word, cutlass::bfloat16_t) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word));
}

__device__ __forceinline__ uint32_t pack(float low, float high, cutlass::half_t) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack(float low, float high, cutlass::bfloat16_t) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// 16 bytes that are read once, or zeros; a predicate, so that loads overlap.
__device__ __forceinline__ uint4 load_if(bool condition, const void* address) {
    uint4 x;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(address), "r"(static_cast<int>(condition)));
    return x;
}

// One warpgroup's rows of one tile.
template <typename C, Epilogue kEpilogue, bool kGated>
struct TileEpilogue {
    using T = typename C::Element;
    static constexpr int kRowsOfThread = 2 * C::kRowBlocks;
    static constexpr int kColumnGroups = C::kTileN / kPermutedRows;
    static_assert(!kGated || kColumnGroups % 2 == 0);
    // A unit: eight neighbours in a row, or eight gates and their eight values.
    static constexpr int kUnitsOfRow = kColumnGroups / (kGated ? 2 : 1);
    static constexpr int kUnits = kRowsOfThread * kUnitsOfRow;
    const Params& p;
    int m, n;  // first row, first column of sums
    int lane = static_cast<int>(threadIdx.x) % 32;
    int first_row = m + static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16 + lane / 4;
    int first_column = n + lane % 4 * 8;

    __device__ __forceinline__ int row(int i) const { return first_row + i / 2 * 64 + i % 2 * 8; }

    // Sum e (of 8) of the thread's row i and column group q.
    __device__ __forceinline__ static constexpr int at(int i, int q, int e) {
        return i / 2 * (C::kTileN / 2) + 16 * q + e / 2 * 4 + i % 2 * 2 + e % 2;
    }

    struct Everything {
        __device__ __forceinline__ constexpr bool operator()(int, int) const { return true; }
        __device__ __forceinline__ uint4 load(int, int, const T* eight) const {
            return __ldcs(reinterpret_cast<const uint4*>(eight));
        }
    };

    struct OwnUnits {
        uint32_t bits;
        __device__ __forceinline__ bool operator()(int i, int q) const {
            return (bits >> (i * kUnitsOfRow + q / (kGated ? 2 : 1)) & 1) != 0;
        }
        __device__ __forceinline__ uint4 load(int i, int q, const T* eight) const {
            return load_if((*this)(i, q), eight);
        }
    };

    __device__ __forceinline__ bool has_group(int q) const { return n + q * kPermutedRows < p.n; }

    // sums = bias, or 0. Addresses outside are moved inside instead of skipped, so that no branch
    // keeps the loads from overlapping.
    template <typename Accumulators>
    __device__ __forceinline__ void load(Accumulators& sums) const {
#pragma unroll
        for (int i = 0; i < cute::size(Accumulators{}); ++i) sums(i) = 0.0f;
        if (p.bias != nullptr) add_bias(sums);
    }

    // sums = bias + residual, or 0. The bias is a constant: it is under way before wait(), which
    // must come before what kernels write.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void load_all(Accumulators& sums, const Wait& wait) const {
        load(sums);
        wait();
        if (p.residual != nullptr) add_residual(sums);
    }

    // The same where each of the CTAs that share k adds them to the units that it will finish.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void load_units(Accumulators& sums, int rank, int num_ranks,
                                               const Wait& wait) const {
        OwnUnits owns{0};
        for (int u = rank; u < kUnits; u += num_ranks) owns.bits |= 1u << u;
#pragma unroll
        for (int i = 0; i < cute::size(Accumulators{}); ++i) sums(i) = 0.0f;
        if (p.bias != nullptr) add_bias(sums, owns);
        wait();
        if (p.residual != nullptr) add_residual(sums, owns);
    }

    __device__ __forceinline__ int inside_column(int q) const {
        return first_column + (has_group(q) ? q * kPermutedRows : 0);
    }

    template <typename Accumulators, typename Owns = Everything>
    __device__ __forceinline__ void add_residual(Accumulators& sums, const Owns& owns = {}) const {
        uint4 eights[kRowsOfThread][kColumnGroups];
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            const T* words =
                static_cast<const T*>(p.residual) + int64_t{min(row(i), p.m - 1)} * p.n;
#pragma unroll
            for (int q = 0; q < kColumnGroups; ++q) {
                eights[i][q] = owns.load(i, q, words + inside_column(q));
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
            for (int q = 0; q < kColumnGroups; ++q) add(sums, i, q, eights[i][q]);
        }
    }

    template <typename Accumulators, typename Owns = Everything>
    __device__ __forceinline__ void add_bias(Accumulators& sums, const Owns& owns = {}) const {
        uint4 eights[kColumnGroups];
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
            eights[q] = __ldg(
                reinterpret_cast<const uint4*>(static_cast<const T*>(p.bias) + inside_column(q)));
        }
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                if (owns(i, q)) add(sums, i, q, eights[q]);
            }
        }
    }

    template <typename Accumulators>
    static __device__ __forceinline__ void add(Accumulators& sums, int i, int q, uint4 eight) {
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const float2 pair = unpack(words[e / 2], T{});
            sums(at(i, q, e)) += pair.x;
            sums(at(i, q, e + 1)) += pair.y;
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ void store(const Accumulators& sums) const {
        const int64_t stride = kGated ? p.n / 2 : p.n;
        const int column = kGated ? n / 2 + lane % 4 * 8 : first_column;
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (row(i) >= p.m) continue;
            T* out = static_cast<T*>(p.d) + row(i) * stride + column;
#pragma unroll
            for (int q = 0; q < kColumnGroups; q += kGated ? 2 : 1) {
                if (!has_group(q)) continue;
                *reinterpret_cast<uint4*>(out + (kGated ? q / 2 : q) * kPermutedRows) =
                    finish(sums, i, q);
            }
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ uint4 finish(const Accumulators& sums, int i, int q) const {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            words[e / 2] = pack(value(sums, i, q, e), value(sums, i, q, e + 1), T{});
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    template <typename Accumulators>
    __device__ __forceinline__ float value(const Accumulators& sums, int i, int q, int e) const {
        const float x = activate<kEpilogue>(sums(at(i, q, e)), p.activation);
        if constexpr (kGated) return x * sums(at(i, q + 1, e));
        return x;
    }
};

}  // namespace bytetx::gemm
