// Shared by the parts of the bf16 linear layer: the loop over blocks, and a kernel for each
// instruction set.
#pragma once

#include <cstdint>

#include "bf16_ops.h"
#include "cpu/tile_blocks.h"

namespace bytetx::cpu {

constexpr int64_t kBf16Rows = 48;     // most rows of a block without tiles
constexpr int64_t kBf16Columns = 32;  // columns per panel of the weight
constexpr int64_t kCacheLineWords = 16;

inline int64_t feature_pairs(int64_t k) { return (k + 1) / 2; }

// 32-bit words of a row of x, in f32, and of a panel.
inline int64_t row_words(int64_t k) {
    return (2 * feature_pairs(k) + kCacheLineWords - 1) / kCacheLineWords * kCacheLineWords;
}
inline int64_t panel_words(int64_t k) { return feature_pairs(k) * kBf16Columns; }

// Words of the staged rows of any kernel's block, whole cache lines.
inline int64_t staged_words(int64_t k) {
    const int64_t row_bytes = staged_row_bytes(k * 2), vectors = kBf16Rows * row_words(k);
    const int64_t on_tiles = staged_rows(row_bytes) * row_bytes / 4;
    return vectors > on_tiles ? vectors : on_tiles;
}

struct Bf16Kernel {
    // Rows [begin, end), at most block_rows(k), and panels [first, last) of the result. staged:
    // room for staged_words(k); panel: for one panel, which plain weights are packed into.
    void (*run)(const Bf16LinearParams& p, int64_t begin, int64_t end, int64_t first, int64_t last,
                void* staged, uint32_t* panel);
    int64_t tile_rows;
    int64_t (*block_rows)(int64_t k);  // a multiple of tile_rows
};

}  // namespace bytetx::cpu
