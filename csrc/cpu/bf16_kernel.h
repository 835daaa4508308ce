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
#include "cpu/bf16_pack.h"
#include "cpu/panel_tile.h"

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

constexpr int64_t kBlockWords = int64_t{64} << 10;  // words of a block's rows: half of a small L2

inline int64_t bf16_block_rows(int64_t k) {
    const int64_t most = kBf16Rows / kTileRows, fitting = kBlockWords / row_words(k) / kTileRows;
    return (fitting < 1 ? 1 : fitting < most ? fitting : most) * kTileRows;
}

inline void run_bf16_block(const Bf16LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, void* staged, uint32_t* panel) {
    auto* rows = static_cast<float*>(staged);
    const int64_t stride = row_words(p.k), num_rows = end - begin;
    const auto* x = static_cast<const Bf16*>(p.x) + begin * p.k;
    for (int64_t r = 0; r < num_rows; ++r) widen_row(x + r * p.k, p.k, rows + r * stride);
    for (int64_t at = first; at < last; ++at) {
        const uint32_t* weight = panel_of(p, at, panel);
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

constexpr Bf16Kernel make_bf16_kernel() { return {run_bf16_block, kTileRows, bf16_block_rows}; }

}  // namespace bytetx::cpu::BYTETX_SIMD
