// The 8-bit linear layer's kernel on tiles of AMX: rows to 8 bits as they are staged, products on
// tiles, and the vectors' epilogue beside them. The integers are those of every instruction set.
//
// Bound by: the tiles' multiplier, 1024 products a cycle of a core, where k is large; below some
// k = 768 the epilogue, 10 cycles for 16 results and as many again for a GELU.
#pragma once

#include "cpu/int8_rows.h"
#include "cpu/tile_product.h"

namespace bytetx::cpu::BYTETX_SIMD {

struct Int8Tiles {
    using Sum = int32_t;

    template <int kSum, int kA, int kB>
    static inline void multiply() {
        tiles::multiply_bytes<kSum, kA, kB>();
    }
};

static_assert(kPanelColumns == kInt8Columns);

template <typename T>
inline void multiply_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, Word* q, QuantizedRow* rows) {
    const int64_t padded = staged_row_bytes(p.k), num_steps = padded / tiles::kRowBytes;
    const T* x = static_cast<const T*>(p.x);
    for (int64_t r = begin; r < end; ++r) {
        Word* to = q + staged_offset(r - begin, num_steps);
        rows[r - begin] = quantize_row(x + r * p.k, p.k, to, padded, kTileBytes);
    }
    const int64_t num_groups = padded_features(p.k) / kInt8Group;
    multiply_staged<Int8Tiles>(
        reinterpret_cast<const uint8_t*>(q), end - begin, num_groups, first, last,
        [&](int64_t panel) { return p.weight + panel * num_groups * kGroupBytes; },
        [&](const int32_t* sums, int64_t row, int64_t column) {
            for (int64_t c = 0; c < kPanelColumns && column + c < p.n; c += Vec::kWidth) {
                const OutputVectors outputs(p, column + c);
                finish_sums<T>(p, outputs, sums + c, rows[row], begin + row, column + c);
            }
        });
}

inline int64_t int8_block_rows(int64_t k) { return staged_rows(staged_row_bytes(k)); }

inline void run_int8_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, void* q, QuantizedRow* rows) {
    const auto multiply_rows = p.dtype == DType::f32 ? multiply_block<float> : multiply_block<Bf16>;
    multiply_rows(p, begin, end, first, last, static_cast<Word*>(q), rows);
}

// Declared here so that the constant, which another file names, is not file-local.
extern const Int8Kernel kInt8Kernel;

constexpr Int8Kernel make_int8_kernel() { return {run_int8_block, tiles::kRows, int8_block_rows}; }

}  // namespace bytetx::cpu::BYTETX_SIMD
