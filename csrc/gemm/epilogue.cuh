// Pieces of epilogues: the position of accumulators in a tile, activations, rounding.
//
// An epilogue is one struct, made for each tile that a warpgroup works on:
//
//   struct Epilogue : EpilogueDefaults, TileLayout<C> {
//       struct Inputs { ... };      // operands as pointers and scalars: a part of Params
//       struct Smem { ... };        // its shared memory, if any
//       Epilogue(const K& k, int m, int n, int round);   // the tile's first row and column
//       void begin(sums, wait);     // before the products; calls wait() before it reads results
//       void finish(sums);          // behind them
//   };
//
// K is the Context of gemm/kernel.cuh: k.p.epilogue are the Inputs, k.s the shared memory. A tile
// of d's size that it reads may come by TMA: see tile_input.cuh. docs/kernels/linear.md has an
// example.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "gemm/config.cuh"
#include "ops.h"

namespace bytetx::gemm {

struct EpilogueDefaults {
    struct Smem {};
    // Whether all threads wait for the kernel before, before any role begins.
    static constexpr bool kWaitsFirst = false;
    // Whether the next kernel may begin only when all before this one have ended.
    static constexpr bool kReleasesLate = false;
    static constexpr bool kHasParameters = false;  // load_parameters() stores to shared memory

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K&) {}  // one thread
    template <typename K>
    static __device__ __forceinline__ void load_parameters(const K&) {}  // all threads, first
    template <typename K>
    static __device__ __forceinline__ void before_tiles(const K&) {}  // those that multiply
};

// Form of an activation. linear: none, relu. erf: exact GELU. sigmoid: tanh GELU, SiLU, tanh.
enum class ActivationForm : int { linear = 0, erf = 1, sigmoid = 2 };

// linear is max(x, floor); sigmoid is s * (times_x * x + times_one) + offset with
// s = 1 / (1 + 2^-(x * (scale + scale_cubed * x * x))).
struct ActivationConstants {
    float floor;
    float scale, scale_cubed;
    float times_x, times_one, offset;
};

inline ActivationConstants activation_constants(Activation activation) {
    constexpr float kLog2e = 1.4426950408889634f;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    switch (activation) {
        case Activation::relu:
            return {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        case Activation::gelu_tanh: {  // x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
            constexpr float kScale = 1.5957691216057308f * kLog2e;
            return {-kInfinity, kScale, 0.044715f * kScale, 1.0f, 0.0f, 0.0f};
        }
        case Activation::silu:
            return {-kInfinity, kLog2e, 0.0f, 1.0f, 0.0f, 0.0f};
        case Activation::tanh:  // 2 * sigmoid(2 * x) - 1
            return {-kInfinity, 2.0f * kLog2e, 0.0f, 0.0f, 2.0f, -1.0f};
        default:
            return {-kInfinity, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    }
}

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

template <ActivationForm kForm>
__device__ __forceinline__ float activate(float x, const ActivationConstants& c) {
    if constexpr (kForm == ActivationForm::erf) return gelu_erf(x);
    if constexpr (kForm == ActivationForm::sigmoid) {
        const float z = x * fmaf(c.scale_cubed, x * x, c.scale);
        const float sigmoid = reciprocal_approx(1.0f + exp2_approx(-z));
        return fmaf(sigmoid, fmaf(c.times_x, x, c.times_one), c.offset);
    }
    return x < c.floor ? c.floor : x;  // NaN stays NaN
}

__device__ __forceinline__ float2 unpack(uint32_t word, Half) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
}

__device__ __forceinline__ float2 unpack(uint32_t word, BFloat16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word));
}

__device__ __forceinline__ uint32_t pack(float low, float high, Half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack(float low, float high, BFloat16) {
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

// Shared memory address in CTA `rank` of the cluster that corresponds to `own` in this CTA.
__device__ __forceinline__ uint32_t peer_address(const void* own, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(own)), "r"(rank));
    return remote;
}

// Where a thread's accumulators lie in the tile: for each 64 rows of the warpgroup rows 16 * warp +
// lane / 4 and + 8; of every 32 columns the eight from 8 * (lane % 4) on (see kPermutedRows).
template <typename C>
struct TileLayout {
    static constexpr int kRowsOfThread = 2 * C::kRowBlocks;
    static constexpr int kColumnGroups = C::kTileN / kPermutedRows;
    const Problem& p;
    int m, n;  // first row, first column
    int lane = static_cast<int>(threadIdx.x) % 32;
    int first_row = m + static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16 + lane / 4;
    int first_column = n + lane % 4 * 8;

    __device__ __forceinline__ TileLayout(const Problem& p, int m, int n) : p(p), m(m), n(n) {}

    static __device__ __forceinline__ constexpr int row_offset(int i) {
        return i / 2 * 64 + i % 2 * 8;
    }
    __device__ __forceinline__ int row(int i) const { return first_row + row_offset(i); }

    // Sum e (of 8) of the thread's row i and column group q.
    __device__ __forceinline__ static constexpr int at(int i, int q, int e) {
        return i / 2 * (C::kTileN / 2) + 16 * q + e / 2 * 4 + i % 2 * 2 + e % 2;
    }

    __device__ __forceinline__ bool has_group(int q) const { return n + q * kPermutedRows < p.n; }

    // Columns outside are moved inside instead of skipped, so that no branch keeps loads from
    // overlapping.
    __device__ __forceinline__ int inside_column(int q) const {
        return first_column + (has_group(q) ? q * kPermutedRows : 0);
    }

    // sums += eight neighbours of 16 bits.
    template <typename Accumulators>
    static __device__ __forceinline__ void add(Accumulators& sums, int i, int q, uint4 eight) {
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const float2 pair = unpack(words[e / 2], typename C::Element{});
            sums(at(i, q, e)) += pair.x;
            sums(at(i, q, e + 1)) += pair.y;
        }
    }
};

}  // namespace bytetx::gemm
