// Shared by the parts of the 8-bit linear layer: the loop over blocks, and a kernel for each
// instruction set.
#pragma once

#include <cstdint>

#include "cpu/tile_blocks.h"
#include "int8_ops.h"

namespace bytetx::cpu {

// Most rows of a block without tiles: with a panel of the weight in L1 or L2.
constexpr int64_t kInt8Rows = 48;
constexpr int64_t kInt8Columns = 32;  // columns per panel of the weight
constexpr int64_t kInt8Group = 4;     // features that one instruction multiplies

// A row x is about scale * (q - zero); shift is the sum of q times
// what multiply() finds added to a weight.
struct QuantizedRow {
    float scale;
    float zero;
    int32_t shift;
};

inline int64_t padded_features(int64_t k) { return (k + kInt8Group - 1) / kInt8Group * kInt8Group; }

constexpr int64_t kMostWordBytes = 2;  // per feature of a rounded row

// Bytes of the rounded rows of any kernel's block.
inline int64_t rounded_bytes(int64_t k) {
    const int64_t staged = staged_row_bytes(k), vectors = kInt8Rows * kMostWordBytes;
    const int64_t on_tiles = staged_rows(staged) * staged;
    return vectors * padded_features(k) > on_tiles ? vectors * padded_features(k) : on_tiles;
}

struct Int8Kernel {
    // Rows [begin, end), at most block_rows(k), and panels [first, last) of the result. q: room for
    // rounded_bytes(k); rows: for block_rows(k).
    void (*run)(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first, int64_t last,
                void* q, QuantizedRow* rows);
    int64_t tile_rows;
    int64_t (*block_rows)(int64_t k);
};

}  // namespace bytetx::cpu
