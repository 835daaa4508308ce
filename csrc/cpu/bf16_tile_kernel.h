// The bf16 linear layer's kernel on tiles of AMX: rows are copied as tiles, and the vectors'
// epilogue runs beside the products.
//
// A tile's sums take 32 features at a time, those of even and of odd places apart, in an order that
// neither the other rows nor the number of threads change; it is not the order of one chain, which
// the other instruction sets have.
//
// Bound by: the tiles' multiplier, 512 products a cycle of a core.
#pragma once

#include "cpu/bf16_pack.h"
#include "cpu/simd_math.h"
#include "cpu/tile_product.h"

namespace bytetx::cpu::BYTETX_SIMD {

struct Bf16Tiles {
    using Sum = float;

    template <int kSum, int kA, int kB>
    static inline void multiply() {
        tiles::multiply_bf16<kSum, kA, kB>();
    }
};

static_assert(kPanelColumns == kBf16Columns);

// A row as tiles, zeros behind its last feature.
inline void stage_row(const Bf16* x, int64_t k, uint8_t* to) {
    constexpr int64_t kFeatures = tiles::kRowBytes / 2;
    for (int64_t i = 0; i < k; i += kFeatures, to += kTileBytes) {
        const int64_t room = k - i;
        const __m512i part = room >= kFeatures ? _mm512_loadu_si512(x + i)
                                               : _mm512_maskz_loadu_epi16((1u << room) - 1, x + i);
        _mm512_store_si512(to, part);
    }
}

inline void finish_sums(const Bf16LinearParams& p, const float* sums, int64_t row, int64_t column) {
    const auto* biases = static_cast<const Bf16*>(p.bias);
    auto* d = static_cast<Bf16*>(p.d) + row * p.n;
    for (int64_t c = 0; c < kPanelColumns && column + c < p.n; c += Vec::kWidth) {
        const int64_t at = column + c, room = p.n - at;
        const Vec bias = biases != nullptr ? load_some(biases + at, room) : broadcast(0.0f);
        const Vec sum = load(sums + c) + bias;
        store_some(d + at, room, activate(sum, p.activation, [](Vec v) { return fast_gelu(v); }));
    }
}

inline int64_t bf16_block_rows(int64_t k) { return staged_rows(staged_row_bytes(k * 2)); }

inline void run_bf16_block(const Bf16LinearParams& p, int64_t begin, int64_t end, int64_t first,
                           int64_t last, void* staged, uint32_t* panel) {
    const int64_t num_steps = staged_row_bytes(p.k * 2) / tiles::kRowBytes;
    const auto* x = static_cast<const Bf16*>(p.x);
    auto* rows = static_cast<uint8_t*>(staged);
    for (int64_t r = begin; r < end; ++r) {
        stage_row(x + r * p.k, p.k, rows + staged_offset(r - begin, num_steps));
    }
    multiply_staged<Bf16Tiles>(
        rows, end - begin, feature_pairs(p.k), first, last,
        [&](int64_t at) { return reinterpret_cast<const uint8_t*>(panel_of(p, at, panel)); },
        [&](const float* sums, int64_t row, int64_t column) {
            finish_sums(p, sums, begin + row, column);
        });
}

// Declared here so that the constant, which another file names, is not file-local.
extern const Bf16Kernel kBf16Kernel;

constexpr Bf16Kernel make_bf16_kernel() { return {run_bf16_block, tiles::kRows, bf16_block_rows}; }

}  // namespace bytetx::cpu::BYTETX_SIMD
