// The interface of csrc/cpu/tiles.h in plain C++, found before it: for processors without AMX.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cpu/simd.h"

namespace bytetx::cpu::BYTETX_SIMD::tiles {

constexpr int64_t kRows = 16;
constexpr int64_t kRowBytes = 64;

inline thread_local bool is_configured = false;
alignas(64) inline thread_local uint8_t registers[8][kRows][kRowBytes];

inline void require(bool holds) {
    if (!holds) std::abort();  // as the hardware faults
}

class Tiles {
  public:
    Tiles() {
        require(!is_configured);
        is_configured = true;
        std::memset(registers, 0xff, sizeof(registers));
    }
    ~Tiles() { is_configured = false; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int kTile>
inline void load(const void* p, int64_t stride) {
    require(is_configured);
    for (int64_t r = 0; r < kRows; ++r) {
        std::memcpy(registers[kTile][r], static_cast<const uint8_t*>(p) + r * stride, kRowBytes);
    }
}

template <int kTile>
inline void store(void* p, int64_t stride) {
    require(is_configured);
    for (int64_t r = 0; r < kRows; ++r) {
        std::memcpy(static_cast<uint8_t*>(p) + r * stride, registers[kTile][r], kRowBytes);
    }
}

template <int kTile>
inline void zero() {
    require(is_configured);
    std::memset(registers[kTile], 0, sizeof(registers[kTile]));
}

template <int kSum, int kA, int kB>
inline void multiply_bytes() {
    require(is_configured);
    static_assert(kSum != kA && kSum != kB && kA != kB);
    for (int64_t r = 0; r < kRows; ++r) {
        int32_t sums[16];
        std::memcpy(sums, registers[kSum][r], sizeof(sums));
        for (int64_t i = 0; i < kRows; ++i) {
            for (int64_t c = 0; c < 16; ++c) {
                for (int64_t j = 0; j < 4; ++j) {
                    const auto a = static_cast<int8_t>(registers[kA][r][4 * i + j]);
                    // Wraps, as the instruction does.
                    sums[c] = static_cast<int32_t>(
                        static_cast<uint32_t>(sums[c]) +
                        static_cast<uint32_t>(a * registers[kB][i][4 * c + j]));
                }
            }
        }
        std::memcpy(registers[kSum][r], sums, sizeof(sums));
    }
}

}  // namespace bytetx::cpu::BYTETX_SIMD::tiles
