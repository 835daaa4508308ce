// The matrix unit of Hopper (wgmma): a warpgroup adds to 64 rows and kN columns of sums in its
// registers the products of two operands of 16 features (E4M3: 32). b lies in shared memory, a
// there or in registers.
//
// Registers of a thread: rows r0 = 16 * warp + lane / 4 and r0 + 8, columns 8 * j + 2 * (lane % 4)
// + {0, 1}: sums 4 * j + e are row r0, 4 * j + 2 + e row r0 + 8. As an operand a, four registers
// hold two features each, of r0 and r0 + 8, then the same eight features on: the order of 8 sums.
//
// In shared memory an operand lies in rows of 64 or 128 bytes, whose 16-byte pieces are permuted as
// TMA's swizzles do it; groups of eight rows lie side by side.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "common/element.cuh"
#include "common/ptx.cuh"

namespace bytetx {

// A thread's accumulators.
template <int kNum>
struct Sums {
    static constexpr int kSize = kNum;
    float x[kNum];

    __device__ __forceinline__ float& operator()(int i) { return x[i]; }
    __device__ __forceinline__ const float& operator()(int i) const { return x[i]; }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kNum; ++i) x[i] = 0.0f;
    }
    // The compiler moves no access to them across this.
    __device__ __forceinline__ void pin() {
#pragma unroll
        for (int i = 0; i < kNum; ++i) asm volatile("" : "+f"(x[i])::"memory");
    }
};

// Before the first product, and after registers that products use were written.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// The products since the last call are one group.
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most so many groups, the last ones, are still under way.
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Where an operand begins in shared memory, and how its groups of eight rows lie. Units: 16 bytes.
union Operand {
    uint64_t bits;
    uint32_t words[2];  // the start is in the first

    __device__ __forceinline__ Operand operator+(int units) const {
        Operand moved;
        moved.words[0] = words[0] + static_cast<uint32_t>(units);
        moved.words[1] = words[1];
        return moved;
    }
};

// group_step: from eight rows to the next eight. box_step: from one box of columns to the next,
// where rows are features (transposed), else no matter.
template <int kRowBytes>
__device__ __forceinline__ Operand operand_at(const void* smem, int group_step, int box_step = 1) {
    static_assert(kRowBytes == 64 || kRowBytes == 128);
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
    return {(smem_address(smem) >> 4 & 0x3fff) | static_cast<uint64_t>(box_step) << 16 |
            static_cast<uint64_t>(group_step) << 32 | kSwizzle << 62};
}

// ---- the instruction: CUTLASS has it for each shape and type, registers named one by one

template <typename T, int kN, cute::SM90::GMMA::Major kMajorB>
struct Atoms;

#define BYTETX_ATOMS(n)                                                                            \
    template <cute::SM90::GMMA::Major kMajorB>                                                     \
    struct Atoms<Half, n, kMajorB> {                                                               \
        using Smem =                                                                               \
            cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<cute::SM90::GMMA::Major::K, kMajorB>;   \
        using Registers =                                                                          \
            cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, kMajorB>;   \
    };                                                                                             \
    template <cute::SM90::GMMA::Major kMajorB>                                                     \
    struct Atoms<BFloat16, n, kMajorB> {                                                           \
        using Smem =                                                                               \
            cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, kMajorB>; \
        using Registers =                                                                          \
            cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, kMajorB>; \
    };                                                                                             \
    template <cute::SM90::GMMA::Major kMajorB>                                                     \
    struct Atoms<E4m3, n, kMajorB> {                                                               \
        using Smem = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<>;                        \
    };

BYTETX_ATOMS(8)
BYTETX_ATOMS(16)
BYTETX_ATOMS(32)
BYTETX_ATOMS(64)
BYTETX_ATOMS(96)
BYTETX_ATOMS(128)
BYTETX_ATOMS(192)
BYTETX_ATOMS(256)
#undef BYTETX_ATOMS

// d[kN / 2] = a b^T, where adds is 0, or += it, where it is 1. Asynchronous.
template <typename T, int kN>
__device__ __forceinline__ void multiply_add(float* d, Operand a, Operand b, int adds) {
    using Atom = typename Atoms<T, kN, cute::SM90::GMMA::Major::K>::Smem;
    [&]<int... i>(std::integer_sequence<int, i...>) {
        Atom::fma(a.bits, b.bits, d[i]..., static_cast<cute::SM90::GMMA::ScaleOut>(adds));
    }(std::make_integer_sequence<int, kN / 2>{});
}

// The same with a[4] in registers. kIsTransposed: b's rows are features.
template <typename T, int kN, bool kIsTransposed>
__device__ __forceinline__ void multiply_add(float* d, const uint32_t* a, Operand b, int adds) {
    constexpr auto kMajorB =
        kIsTransposed ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
    using Atom = typename Atoms<T, kN, kMajorB>::Registers;
    [&]<int... i>(std::integer_sequence<int, i...>) {
        Atom::fma(a[0], a[1], a[2], a[3], b.bits, d[i]...,
                  static_cast<cute::SM90::GMMA::ScaleOut>(adds));
    }(std::make_integer_sequence<int, kN / 2>{});
}

}  // namespace bytetx
