// The tiles of AMX: eight registers of 16 rows of 64 bytes, all of one shape. A thread configures
// them before it uses them and releases them afterwards: other libraries have shapes of their own,
// and released tiles cost a context switch nothing.
//
// In assembly, for compilers' intrinsics take no template argument as the number of a register.
#pragma once

#include <cstdint>

#include "cpu/simd.h"

namespace bytetx::cpu::BYTETX_SIMD::tiles {

constexpr int64_t kRows = 16;
constexpr int64_t kRowBytes = 64;

struct alignas(64) Configuration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);

// The calling thread's tiles while it lives.
class Tiles {
  public:
    Tiles() {
        const Configuration configuration;
        asm volatile("ldtilecfg %0" ::"m"(configuration));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// stride: bytes from a row to the next one.
template <int kTile>
inline void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "n"(kTile) : "memory");
}

template <int kTile>
inline void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "n"(kTile) : "memory");
}

template <int kTile>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"n"(kTile));
}

// sum[r][c] += the products of 64 signed bytes of a's row r with unsigned ones of b, whose row i
// holds the i-th 4 of each of 16 columns.
template <int kSum, int kA, int kB>
inline void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kSum), "n"(kA), "n"(kB));
}

}  // namespace bytetx::cpu::BYTETX_SIMD::tiles
