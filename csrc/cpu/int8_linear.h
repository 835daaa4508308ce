// Shared by the parts of the 8-bit linear layer: the loop over blocks, and a kernel for each
// instruction set.
#pragma once

#include <cstdint>

#include "int8_ops.h"

namespace bytetx::cpu {

constexpr int64_t kInt8Rows = 48;  // most rows of a block: with a panel of the weight in L1 or L2
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

struct Int8Kernel {
    // Rows [begin, end), at most kInt8Rows, and panels [first, last) of the result. q: room for
    // kInt8Rows rows of padded_features(k) words; rows: as many.
    void (*run)(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first, int64_t last,
                void* q, QuantizedRow* rows);
    int64_t word_bytes;  // bytes per feature of a rounded row
    int64_t tile_rows;
};

}  // namespace bytetx::cpu
