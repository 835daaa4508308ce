// Shared by products with panels: the loops, and the kernels of each instruction set.
#pragma once

#include <cstdint>

#include "panel_ops.h"

namespace bytetx::cpu {

// Outputs of the smallest piece of work: a cache line of f32, or of pairs of bf16.
constexpr int64_t kStripColumns = 16;

inline int64_t num_strips(const PanelMatrix& w) {
    return (w.n + kStripColumns - 1) / kStripColumns;
}

// 32-bit words of a row as the kernels read it.
inline int64_t panel_row_words(int64_t k) { return (k + 15) / 16 * 16; }

// act(rows @ w.T + bias) of staged rows.
struct PanelProduct {
    PanelMatrix w;
    const float* rows;  // [m] of panel_row_words(w.k) words, from stage()
    void* d;            // [m, n], dtype
    int64_t m;
    Activation activation;
};

// The kernels of one instruction set for one dtype; null where it has none.
struct PanelKernels {
    // Rows [m, k] of the dtype as multiply() reads them; zeros behind k.
    void (*stage)(const void* x, int64_t m, int64_t k, float* rows) = nullptr;
    // Strips [first, last) of the outputs.
    void (*multiply)(const PanelProduct& p, int64_t first, int64_t last) = nullptr;
    // Columns [begin, end) of one row's results.
    void (*gate)(const GateBlocksParams& p, int64_t row, int64_t begin, int64_t end) = nullptr;
};

struct PanelKernelTable {
    PanelKernels f32, bf16, bf16_dot;
};

// has_bf16_dot: as of PanelMatrix. isa: resolved.
PanelKernels panel_kernels(Isa isa, DType dtype, bool has_bf16_dot);

// Strips of a thread's piece of work, whole panels where there are enough of them.
int64_t strips_of_task(const PanelMatrix& w, int num_threads);

// Throws std::invalid_argument where a matrix is not what PanelMatrix says.
void check_panels(const char* op, const PanelMatrix& w, DType dtype);

}  // namespace bytetx::cpu
