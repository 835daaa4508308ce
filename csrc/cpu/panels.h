// Shared by products with panels: the loops, and the kernels of each instruction set.
#pragma once

#include <cstdint>

#include "coded_rows_ops.h"
#include "panel_ops.h"

namespace bytetx::cpu {

// Outputs of the smallest piece of work: a cache line of f32, or of pairs of bf16.
constexpr int64_t kStripColumns = 16;

inline int64_t num_strips(const PanelMatrix& w) {
    return (w.n + kStripColumns - 1) / kStripColumns;
}

// Whether outputs are rows of features, which the kernels transpose as they read them.
inline bool has_plain_rows(const PanelMatrix& w) { return w.columns == 1; }

// Codes: features that share a scale, and bytes of such a group of 16 outputs.
constexpr int64_t kGroupFeatures = 32;
constexpr int64_t kGroupBytes8 = kStripColumns * (kGroupFeatures + 2);
constexpr int64_t kGroupBytes4 = kStripColumns * (kGroupFeatures / 2 + 4);

inline bool has_codes(PanelFormat format) {
    return format == PanelFormat::int8 || format == PanelFormat::int4;
}

// Bytes of a group in a row of codes, as coded_rows_ops.h says.
constexpr int64_t kCodedBytes8 = 2 + kGroupFeatures;
constexpr int64_t kCodedBytes4 = 4 + kGroupFeatures / 2;

// 32-bit words of a row as the kernels read it: whole groups of features or, for codes, of each
// group two words and codes of at most 16 bits, in an odd number of cache lines, so that rows are
// not all in the same sets of a cache.
inline int64_t panel_row_words(int64_t k) {
    return (k + kGroupFeatures - 1) / kGroupFeatures * kGroupFeatures;
}
inline int64_t group_row_words(int64_t k) {
    constexpr int64_t kLineWords = 16;
    const int64_t words = (k + kGroupFeatures - 1) / kGroupFeatures * (2 + kGroupFeatures / 2);
    return ((words + kLineWords - 1) / kLineWords | 1) * kLineWords;
}
inline int64_t panel_row_words(int64_t k, PanelFormat format) {
    return has_codes(format) ? group_row_words(k) : panel_row_words(k);
}
inline int64_t most_row_words(int64_t k) {
    const int64_t plain = panel_row_words(k), codes = group_row_words(k);
    return plain > codes ? plain : codes;
}

// act(rows @ w.T + bias) of staged rows.
struct PanelProduct {
    PanelMatrix w;
    const float* rows;  // [m] of panel_row_words(w.k, w.format) words, from stage()
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

struct GroupKernelTable {  // without gate
    PanelKernels int8_f32, int8_bf16, int4_f32, int4_bf16;
    // One row of numbers, or one row of a GGUF file's blocks, as coded_rows_ops.h says.
    void (*round8_f32)(const void* x, int64_t k, uint8_t* row);
    void (*round8_bf16)(const void* x, int64_t k, uint8_t* row);
    void (*round4_f32)(const void* x, int64_t k, uint8_t* row);
    void (*round4_bf16)(const void* x, int64_t k, uint8_t* row);
    void (*convert)(const uint8_t* blocks, int64_t groups, SavedFormat format, int32_t bits,
                    uint8_t* row);
};

// Null where the processor has none.
const GroupKernelTable* find_groups(Isa isa);

// isa: resolved.
PanelKernels panel_kernels(Isa isa, DType dtype, PanelFormat format);

// Strips of a thread's piece of work, whole panels where there are enough of them.
int64_t strips_of_task(const PanelMatrix& w, int num_threads);

// Throws std::invalid_argument where a matrix is not what PanelMatrix says.
void check_panels(const char* op, const PanelMatrix& w, DType dtype);

}  // namespace bytetx::cpu
