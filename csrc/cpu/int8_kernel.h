// The 8-bit linear layer's kernel on vectors: rows to 8 bits, products in registers, epilogue.
#pragma once

#include "cpu/int8_rows.h"

namespace bytetx::cpu::BYTETX_SIMD {

// kRows rows and kTileColumns outputs. q: the first row's numbers; weight: the first output's.
template <typename T, int kRows>
inline void multiply_tile(const Int8LinearParams& p, const Word* q, const QuantizedRow* rows,
                          int64_t row, const uint8_t* weight, int64_t column) {
    alignas(64) int32_t sums[kRows][kTileColumns];
    multiply<kRows>(q, weight, padded_features(p.k), sums);
    for (int64_t c = 0; c < kTileColumns; c += Vec::kWidth) {
        const int64_t begin = column + c;
        if (begin >= p.n) return;
        const OutputVectors outputs(p, begin);
        for (int r = 0; r < kRows; ++r) {
            finish_sums<T>(p, outputs, sums[r] + c, rows[r], row + r, begin);
        }
    }
}

template <typename T, int kRows>
inline void multiply_rest(const Int8LinearParams& p, const Word* q, const QuantizedRow* rows,
                          int64_t row, const uint8_t* weight, int64_t column, int num_rows) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows) {
            return multiply_tile<T, kRows>(p, q, rows, row, weight, column);
        }
        multiply_rest<T, kRows - 1>(p, q, rows, row, weight, column, num_rows);
    }
}

template <typename T>
inline void multiply_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, Word* q, QuantizedRow* rows) {
    const int64_t padded = padded_features(p.k), num_rows = end - begin;
    const T* x = static_cast<const T*>(p.x) + begin * p.k;
    for (int64_t r = 0; r < num_rows; ++r) {
        rows[r] = quantize_row(x + r * p.k, p.k, q + r * padded, padded, kChunk);
    }
    for (int64_t column = first * kInt8Columns; column < last * kInt8Columns;
         column += kTileColumns) {
        const int64_t panel = column / kInt8Columns * kInt8Columns;
        const uint8_t* weight = p.weight + panel * padded + (column - panel) * kInt8Group;
        int64_t r = 0;
        for (; r + kTileRows <= num_rows; r += kTileRows) {
            multiply_tile<T, kTileRows>(p, q + r * padded, rows + r, begin + r, weight, column);
        }
        const int rest = static_cast<int>(num_rows - r);
        multiply_rest<T, kTileRows - 1>(p, q + r * padded, rows + r, begin + r, weight, column,
                                        rest);
    }
}

inline int64_t int8_block_rows(int64_t) { return kInt8Rows; }

inline void run_int8_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, void* q, QuantizedRow* rows) {
    auto* words = static_cast<Word*>(q);
    const bool is_f32 = p.dtype == DType::f32;
    const auto multiply_rows = is_f32 ? multiply_block<float> : multiply_block<Bf16>;
    multiply_rows(p, begin, end, first, last, words, rows);
}

// Declared here so that the constant, which another file names, is not file-local.
extern const Int8Kernel kInt8Kernel;

constexpr Int8Kernel make_int8_kernel() { return {run_int8_block, kTileRows, int8_block_rows}; }

}  // namespace bytetx::cpu::BYTETX_SIMD
