// The bf16 linear layer's kernel: act(x @ w.T + bias).
//
// A 32-bit word of a packed weight holds two neighbouring features of one output, which a shift and
// a mask take apart into two f32. Rows of x are widened once a block, and each feature is a
// multiply-add. All of k is one chain of f32 sums, so that a result depends on nothing but its own
// row and output. Instructions for bf16 are not used: with them oneDNN sums in a fixed order, too,
// but with AMX, and there (Sapphire Rapids) vdpbf16ps was slower than this, 58 to 86 GFLOP/s of one
// core against 92 to 149.
//
// Tile: 6 rows x 16 outputs with AVX2 and NEON, 12 x 32 with AVX-512; few rows take twice the
// outputs, for as many chains in flight. Bound by: the two multiply-add pipes, from some 4 rows on;
// below, by the weight's way from memory.
#pragma once

#include "cpu/bf16_linear.h"
#include "cpu/panel_tile.h"
#include "cpu/transpose.h"

namespace bytetx::cpu::BYTETX_SIMD {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kVectors = static_cast<int>(kBf16Columns) / Vec::kWidth;  // vectors per panel
constexpr int kTileVectors = 2;
constexpr int kNarrowRows = kTileRows * kTileVectors / kVectors;  // rows of a panel-wide tile

// A row in f32; the last feature's partner is zero.
inline void widen_row(const Bf16* x, int64_t k, float* row) {
    for (int64_t i = 0; i < k; i += Vec::kWidth)
        store_some(row + i, k - i, load_some(x + i, k - i));
    if (k % 2 == 1) row[k] = 0.0f;
}

// kRows rows and kNumVectors vectors of outputs from `column` on. weight: that of its first pair.
template <int kRows, int kNumVectors>
inline void multiply_tile(const Bf16LinearParams& p, const float* rows, int64_t row,
                          const uint32_t* weight, int64_t column) {
    alignas(64) float results[kRows][kNumVectors * Vec::kWidth];
    sum_tile<Bf16Words, kRows, kNumVectors>(rows, row_words(p.k), weight, kBf16Columns,
                                            feature_pairs(p.k), 0, true, results[0],
                                            kNumVectors * Vec::kWidth);
    const auto* biases = static_cast<const Bf16*>(p.bias);
    for (int v = 0; v < kNumVectors; ++v) {
        const int64_t begin = column + v * Vec::kWidth, room = p.n - begin;
        if (room <= 0) return;
        const Vec bias = biases != nullptr ? load_some(biases + begin, room) : broadcast(0.0f);
        for (int r = 0; r < kRows; ++r) {
            const Vec sum = load(results[r] + v * Vec::kWidth) + bias;
            const Vec y = activate(sum, p.activation, [](Vec x) { return exact_gelu(x); });
            store_some(static_cast<Bf16*>(p.d) + (row + r) * p.n + begin, room, y);
        }
    }
}

template <int kRows, int kNumVectors>
inline void multiply_rest(const Bf16LinearParams& p, const float* rows, int64_t row,
                          const uint32_t* weight, int64_t column, int num_rows) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows)
            return multiply_tile<kRows, kNumVectors>(p, rows, row, weight, column);
        multiply_rest<kRows - 1, kNumVectors>(p, rows, row, weight, column, num_rows);
    }
}

// Columns [first, first + 32) of plain weights as a packed panel; those from n on are zeros.
inline void pack_panel(const Bf16LinearParams& p, int64_t first, uint32_t* panel) {
    const int64_t num_pairs = feature_pairs(p.k), whole = p.k / 16 * 8;
    for (int64_t column = 0; column < kBf16Columns; column += 8) {
        const Bf16* weight = static_cast<const Bf16*>(p.weight) + (first + column) * p.k;
        const int64_t num_columns = p.n - first - column;
        int64_t pair = 0;
        for (; num_columns >= 8 && pair < whole; pair += 8) {
            transpose_words(weight + 2 * pair, p.k * int64_t{sizeof(Bf16)},
                            panel + pair * kBf16Columns + column, kBf16Columns);
        }
        for (; pair < num_pairs; ++pair) {
            for (int64_t i = 0; i < 8; ++i) {
                const Bf16* w = weight + i * p.k + 2 * pair;
                uint32_t word = i < num_columns ? w[0].bits : 0;
                if (i < num_columns && 2 * pair + 1 < p.k) word |= uint32_t{w[1].bits} << 16;
                panel[pair * kBf16Columns + column + i] = word;
            }
        }
    }
}

inline void run_bf16_block(const Bf16LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, float* rows, uint32_t* panel) {
    const int64_t stride = row_words(p.k), num_rows = end - begin;
    const auto* x = static_cast<const Bf16*>(p.x) + begin * p.k;
    for (int64_t r = 0; r < num_rows; ++r) widen_row(x + r * p.k, p.k, rows + r * stride);
    for (int64_t at = first; at < last; ++at) {
        const uint32_t* weight = panel;
        if (p.is_packed) {
            weight = static_cast<const uint32_t*>(p.weight) + at * panel_words(p.k);
        } else {
            pack_panel(p, at * kBf16Columns, panel);
        }
        const int64_t column = at * kBf16Columns;
        if (num_rows <= kNarrowRows) {
            multiply_rest<kNarrowRows, kVectors>(p, rows, begin, weight, column,
                                                 static_cast<int>(num_rows));
            continue;
        }
        constexpr int64_t kTileColumns = kTileVectors * Vec::kWidth;
        for (int64_t c = 0; c < kBf16Columns && column + c < p.n; c += kTileColumns) {
            int64_t r = 0;
            for (; r + kTileRows <= num_rows; r += kTileRows) {
                multiply_tile<kTileRows, kTileVectors>(p, rows + r * stride, begin + r, weight + c,
                                                       column + c);
            }
            multiply_rest<kTileRows - 1, kTileVectors>(p, rows + r * stride, begin + r, weight + c,
                                                       column + c, static_cast<int>(num_rows - r));
        }
    }
}

// Declared here so that the constant, which another file names, is not file-local.
extern const Bf16Kernel kBf16Kernel;

constexpr Bf16Kernel make_bf16_kernel() { return {run_bf16_block, kTileRows}; }

}  // namespace bytetx::cpu::BYTETX_SIMD
