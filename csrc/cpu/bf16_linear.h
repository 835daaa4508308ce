// Shared by the parts of the bf16 linear layer: the loop over blocks, and a kernel for each
// instruction set.
#pragma once

#include <cstdint>

#include "bf16_ops.h"

namespace bytetx::cpu {

constexpr int64_t kBf16Rows = 48;     // most rows of a block
constexpr int64_t kBf16Columns = 32;  // columns per panel of the weight
constexpr int64_t kCacheLineWords = 16;

inline int64_t feature_pairs(int64_t k) { return (k + 1) / 2; }

// 32-bit words of a row of x, in f32, and of a panel.
inline int64_t row_words(int64_t k) {
    return (2 * feature_pairs(k) + kCacheLineWords - 1) / kCacheLineWords * kCacheLineWords;
}
inline int64_t panel_words(int64_t k) { return feature_pairs(k) * kBf16Columns; }

struct Bf16Kernel {
    // Rows [begin, end), at most kBf16Rows, and panels [first, last) of the result. rows: room for
    // kBf16Rows rows of row_words(k) words; panel: for one panel, which plain weights are packed
    // into.
    void (*run)(const Bf16LinearParams& p, int64_t begin, int64_t end, int64_t first, int64_t last,
                float* rows, uint32_t* panel);
    int64_t tile_rows;
};

}  // namespace bytetx::cpu
