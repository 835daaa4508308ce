// The kernel of products with panels, and gates: act(x @ w.T + bias) and act(gates) * values.
//
// Tile: with AVX2 and NEON 1 row x 64 outputs, 3 x 32 or 6 x 16, with AVX-512 6 x 64 or 12 x 32, by
// the number of rows, so that there are chains of sums enough in flight and few rows read whole
// lines of a panel one behind another. Outputs in the outer loop: a panel is read from memory once
// and stays in L2 for the next rows. Bound by: the weight's way from memory up to some 8 rows, then
// by the multiply-add pipes.
#pragma once

#include "cpu/panel_tile.h"
#include "cpu/panels.h"
#include "cpu/transpose.h"

namespace bytetx::cpu::BYTETX_SIMD {

#if defined(__AVX512F__)
constexpr int kMostSums = 24, kMostVectors = 4, kMostRows = 12;
#else
constexpr int kMostSums = 12, kMostVectors = 8, kMostRows = 6;
#endif

constexpr int64_t kBlockColumns = 64;  // outputs of a panel that share a pass over k
constexpr int64_t kBlockRows = 64;     // rows of that pass
constexpr int64_t kBlockSteps = 64;    // 16 KiB of the panel at a time

constexpr int rows_of_tile(int vectors) {
    return kMostSums / vectors < kMostRows ? kMostSums / vectors : kMostRows;
}

inline void stage_wide_row(const Bf16* x, int64_t k, float* row) {
    for (int64_t i = 0; i < k; i += Vec::kWidth) {
        store_some(row + i, k - i, load_some(x + i, k - i));
    }
}
inline void stage_wide_row(const float* x, int64_t k, float* row) {
    for (int64_t i = 0; i < k; i += Vec::kWidth) {
        store_some(row + i, k - i, load_some(x + i, k - i));
    }
}

template <typename T>
inline void stage_wide(const void* x, int64_t m, int64_t k, float* rows) {
    const int64_t words = panel_row_words(k);
    for (int64_t r = 0; r < m; ++r) {
        stage_wide_row(static_cast<const T*>(x) + r * k, k, rows + r * words);
        for (int64_t i = k; i < words; ++i) rows[r * words + i] = 0.0f;
    }
}

#if defined(BYTETX_BF16_DOT)
inline void stage_pairs(const void* x, int64_t m, int64_t k, float* rows) {
    const int64_t words = panel_row_words(k);
    for (int64_t r = 0; r < m; ++r) {
        auto* to = reinterpret_cast<char*>(rows + r * words);
        __builtin_memcpy(to, static_cast<const Bf16*>(x) + r * k, k * 2);
        __builtin_memset(to + k * 2, 0, words * 4 - k * 2);
    }
}
#endif

// Some outputs of one panel and some rows, whose sums are in work.
struct PanelBlock {
    const float* rows;
    int64_t row_words;
    const uint32_t* weight;  // at the first output and step
    int64_t columns;         // words from step to step
    int64_t num_rows;
    int64_t num_columns;
    float* sums;  // [num_rows] of kBlockColumns

    template <class Format>
    PanelBlock from(int64_t step) const {
        PanelBlock b = *this;
        b.rows += step * Format::kRowWords;
        b.weight += step * columns;
        return b;
    }
};

template <class Format, int kRows, int kNumVectors>
inline void sum_rows(const PanelBlock& b, int64_t row, int64_t column, int num_rows, int64_t steps,
                     bool starts) {
    if (num_rows == kRows) {
        return sum_tile<Format, kRows, kNumVectors>(
            b.rows + row * b.row_words, b.row_words, b.weight + column, b.columns, steps,
            row == 0 ? b.columns * kBlockSteps : 0, starts, b.sums + row * kBlockColumns + column,
            kBlockColumns);
    }
    if constexpr (kRows > 1) {
        sum_rows<Format, kRows - 1, kNumVectors>(b, row, column, num_rows, steps, starts);
    }
}

// Columns from `column` on, in vectors of at most kNumVectors, with tiles of nearly equal heights.
template <class Format, int kNumVectors>
inline void sum_columns(const PanelBlock& b, int64_t column, int64_t steps, bool starts) {
    constexpr int64_t kColumns = kNumVectors * Vec::kWidth;
    constexpr int kRows = rows_of_tile(kNumVectors);
    if (kColumns <= kStripColumns || b.num_rows <= kRows) {
        const int64_t num_tiles = (b.num_rows + kRows - 1) / kRows;
        for (; column + kColumns <= b.num_columns; column += kColumns) {
            for (int64_t tile = 0; tile < num_tiles; ++tile) {
                const int64_t row = b.num_rows * tile / num_tiles;
                const int64_t end = b.num_rows * (tile + 1) / num_tiles;
                sum_rows<Format, kRows, kNumVectors>(b, row, column, static_cast<int>(end - row),
                                                     steps, starts);
            }
        }
    }
    if constexpr (kColumns > kStripColumns) {
        if (column < b.num_columns) sum_columns<Format, kNumVectors / 2>(b, column, steps, starts);
    }
}

// Steps [at, at + steps) of b's outputs in a weight of plain rows, as a panel of kBlockColumns. The
// weight has `outputs` of them; its last one stands in for the others.
inline PanelBlock transpose_steps(const PanelBlock& b, const PanelMatrix& w, int64_t outputs,
                                  int64_t at, int64_t steps, uint32_t* panel) {
    constexpr int64_t kSide = 8;
    for (int64_t column = 0; column < b.num_columns; column += kSide) {
        const uint32_t* rows = b.weight + column * w.features + at;
        int64_t step = 0;
        for (; column + kSide <= outputs && step + kSide <= steps; step += kSide) {
            transpose_words(rows + step, w.features * int64_t{sizeof(uint32_t)},
                            panel + step * kBlockColumns + column, kBlockColumns);
        }
        for (; step < steps; ++step) {
            for (int64_t i = column; i < column + kSide; ++i) {
                const int64_t output = i < outputs ? i : outputs - 1;
                panel[step * kBlockColumns + i] = b.weight[output * w.features + at + step];
            }
        }
    }
    PanelBlock block = b;
    block.rows += at;
    block.weight = panel;
    block.columns = kBlockColumns;
    return block;
}

// All of k: chain after chain, and of each some steps whose words stay in L1 while all rows and
// columns go through them.  outputs: those of the block that the weight has.
template <class Format>
inline void sum_block(const PanelBlock& b, const PanelMatrix& w, int64_t outputs, float* totals) {
    alignas(64) uint32_t panel[kBlockSteps * kBlockColumns];
    const bool is_plain = has_plain_rows(w);
    constexpr int kFeatures = Format::kFeatures;
    const int64_t num_steps = (w.k + kFeatures - 1) / kFeatures, chain = w.chain / kFeatures;
    const bool is_narrow = b.num_rows * b.num_columns <= int64_t{kMostSums} * Vec::kWidth;
    for (int64_t first = 0; first < num_steps; first += chain) {
        const int64_t end = first + chain < num_steps ? first + chain : num_steps;
        const int64_t most = is_narrow && !is_plain ? end - first : kBlockSteps;
        for (int64_t at = first; at < end; at += most) {
            const int64_t steps = at + most < end ? most : end - at;
            const PanelBlock block =
                is_plain ? transpose_steps(b, w, outputs, at, steps, panel) : b.from<Format>(at);
            sum_columns<Format, kMostVectors>(block, 0, steps, at == first);
        }
        if (chain >= num_steps) return;
        for (int64_t i = 0; i < b.num_rows * kBlockColumns; i += Vec::kWidth) {
            const Vec sum = load(b.sums + i);
            store(totals + i, first == 0 ? sum : load(totals + i) + sum);
        }
    }
    for (int64_t i = 0; i < b.num_rows * kBlockColumns; i += Vec::kWidth) {
        store(b.sums + i, load(totals + i));
    }
}

template <typename T>
inline void finish_block(const PanelProduct& p, const PanelBlock& b, int64_t row, int64_t column) {
    const auto* biases = static_cast<const T*>(p.w.bias);
    for (int64_t c = 0; c < b.num_columns; c += Vec::kWidth) {
        const int64_t begin = column + c, room = p.w.n - begin;
        if (room <= 0) return;
        const Vec bias = biases != nullptr ? load_some(biases + begin, room) : broadcast(0.0f);
        for (int64_t r = 0; r < b.num_rows; ++r) {
            Vec sum = load(b.sums + r * kBlockColumns + c);
            if (biases != nullptr) sum = sum + bias;
            const Vec y = activate(sum, p.activation, [](Vec x) { return exact_gelu(x); });
            store_some(static_cast<T*>(p.d) + (row + r) * p.w.n + begin, room, y);
        }
    }
}

template <class Format, typename T>
inline void multiply_strips(const PanelProduct& p, int64_t first, int64_t last) {
    alignas(64) float sums[kBlockRows * kBlockColumns], totals[kBlockRows * kBlockColumns];
    const PanelMatrix& w = p.w;
    const int64_t stop = last * kStripColumns, words = panel_row_words(w.k);
    const int64_t panel_words = w.features / Format::kFeatures * w.columns;
    for (int64_t column = first * kStripColumns; column < stop;) {
        const int64_t panel = column / w.columns, rest = (panel + 1) * w.columns - column;
        int64_t num_columns = rest < stop - column && !has_plain_rows(w) ? rest : stop - column;
        if (num_columns > kBlockColumns) num_columns = kBlockColumns;
        const int64_t outputs = num_columns < w.n - column ? num_columns : w.n - column;
        const auto* weight =
            static_cast<const uint32_t*>(w.weight) + panel * panel_words + column % w.columns;
        for (int64_t row = 0; row < p.m; row += kBlockRows) {
            const int64_t num_rows = p.m - row < kBlockRows ? p.m - row : kBlockRows;
            const PanelBlock b{p.rows + row * words, words, weight, w.columns, num_rows,
                               num_columns,          sums};
            sum_block<Format>(b, w, outputs, totals);
            finish_block<T>(p, b, row, column);
        }
        column += num_columns;
    }
}

template <typename T>
inline void gate_columns(const GateBlocksParams& p, int64_t row, int64_t begin, int64_t end) {
    const T* both = static_cast<const T*>(p.both) + row * 2 * p.n;
    T* out = static_cast<T*>(p.out) + row * p.n;
    while (begin < end) {
        const int64_t block = begin / p.block, stop = (block + 1) * p.block;
        const int64_t count = (stop < end ? stop : end) - begin;
        const T* gates = both + begin + block * p.block;
        for (int64_t i = 0; i < count; i += Vec::kWidth) {
            const Vec gate = activate(load_some(gates + i, count - i), p.activation,
                                      [](Vec x) { return exact_gelu(x); });
            const Vec value = load_some(gates + p.block + i, count - i);
            store_some(out + begin + i, count - i, gate * value);
        }
        begin += count;
    }
}

// Declared here so that the constant, which another file names, is not file-local.
extern const PanelKernelTable kPanelKernels;

constexpr PanelKernelTable make_panel_kernels() {
    PanelKernelTable table{
        {stage_wide<float>, multiply_strips<F32Words, float>, gate_columns<float>},
        {stage_wide<Bf16>, multiply_strips<Bf16Words, Bf16>, gate_columns<Bf16>},
        {}};
#if defined(BYTETX_BF16_DOT)
    table.bf16_dot = {stage_pairs, multiply_strips<Bf16DotWords, Bf16>, gate_columns<Bf16>};
#endif
    return table;
}

}  // namespace bytetx::cpu::BYTETX_SIMD
