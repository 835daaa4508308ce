// What the decode kernel is made of: a warp's 16 keys in shared memory, and mma.sync on them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

namespace bytetx::paged {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoMax = -3.0e38f;  // below every score, and finite: -inf - (-inf) would be NaN
// A row's running maximum is raised only when a score exceeds it by this much (in powers of two):
// weights stay at most 2^8, and most rescales disappear.
constexpr float kMaxSlack = 8.0f;

// CUTLASS has types of its own for the same numbers.
template <typename T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, cutlass::half_t>;

// 2^x to 2 ulp, subnormal results flushed: the weights are rounded to 11 bits right after.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to 1 ulp; x is a sum of weights, far from the ends of f32.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullMask, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFullMask, x, 1);
    return x + __shfl_xor_sync(kFullMask, x, 2);
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    if constexpr (is_half<T>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

// d += a b: 16 rows, 8 columns, 16 products each.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
    if constexpr (is_half<T>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

// 16 bytes to shared memory, of which the first `bytes` (0 or 16) are read and the rest are zeros.
__device__ __forceinline__ void copy_or_zero(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// Byte offset of a 16-byte piece in rows of kDim elements, permuted so that the same piece of eight
// neighbouring rows, which is what one matrix load reads, lies in different banks.
template <int kDim>
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
    constexpr int kPieces = kDim / 8;
    static_assert(kPieces % 4 == 0);
    const int turn = kPieces % 8 == 0 ? row & 7 : (row >> 1) & 3;
    return (row * kPieces + (piece ^ turn)) * 16;
}

}  // namespace bytetx::paged
