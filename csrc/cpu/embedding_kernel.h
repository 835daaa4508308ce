// The row kernel of embed, included by one file for each instruction set.
//
// Formula: out = norm(word[input_ids] + token_type[token_type_ids] + position[position_ids]) with
// the norm of layer_norm, or no norm; f32 or bf16 tables, summed in f32. A token's rows are
// gathered, summed and normalised while they are in L1; the sum is never stored. Bytes: one row of
// each table read, one row written; the word rows come from memory, the other tables stay in cache.
// Source: standard.
#pragma once

#include "cpu/row_norm.h"
#include "cpu/rows.h"

namespace bytetx::cpu::BYTETX_SIMD {

// Table rows of one token; the order of summation is Hugging Face's: word, token type, position.
template <typename T>
struct EmbedRows {
    const T* rows[3];
    int num_rows;
};

template <typename T>
inline EmbedRows<T> rows_of_token(const EmbedParams& p, int64_t i) {
    const int64_t n = p.hidden_size;
    EmbedRows<T> found;
    found.num_rows = 1;
    found.rows[0] = p.inputs_embeds != nullptr ? static_cast<const T*>(p.inputs_embeds) + i * n
                                               : static_cast<const T*>(p.word) + p.input_ids[i] * n;
    if (p.token_type != nullptr) {
        const T* table = static_cast<const T*>(p.token_type);
        found.rows[found.num_rows++] = table + p.token_type_ids[i] * n;
    }
    if (p.position != nullptr) {
        const T* table = static_cast<const T*>(p.position);
        found.rows[found.num_rows++] = table + p.position_ids[i] * n;
    }
    return found;
}

template <typename T>
inline float stage_token(const EmbedRows<T>& found, int64_t n, float* h) {
    const T* const* r = found.rows;
    if (found.num_rows == 1) {
        const T* const rows[1] = {r[0]};
        return stage_row(rows, n, h);
    }
    if (found.num_rows == 2) {
        const T* const rows[2] = {r[0], r[1]};
        return stage_row(rows, n, h);
    }
    const T* const rows[3] = {r[0], r[1], r[2]};
    return stage_row(rows, n, h);
}

template <typename T, int kRows>
inline void embed_block(const EmbedParams& p, int64_t first, float* h) {
    const int64_t n = p.hidden_size;
    const T* weight = static_cast<const T*>(p.norm_weight);
    T* out = static_cast<T*>(p.out) + first * n;
    float sums[kRows];
    for (int r = 0; r < kRows; ++r) {
        sums[r] = stage_token(rows_of_token<T>(p, first + r), n, h + r * padded_width(n));
    }
    if (weight != nullptr) {
        const T* bias = static_cast<const T*>(p.norm_bias);
        return normalize_rows<RowNorm::layer, kRows>(h, sums, weight, bias, p.eps, n, out);
    }
    for (int r = 0; r < kRows; ++r) store_row(h + r * padded_width(n), n, out + r * n);
}

template <typename T>
inline void embed_rows_of(const EmbedParams& p, int64_t begin, int64_t end) {
    alignas(64) float h[kStageFloats];
    int64_t i = begin;
    if (fits_block<T>(p.hidden_size)) {
        constexpr int kRows = kBlockRows<T>;
        for (; i + kRows <= end; i += kRows) embed_block<T, kRows>(p, i, h);
    }
    for (; i < end; ++i) embed_block<T, 1>(p, i, h);
}

inline void embed_rows(const EmbedParams& p, int64_t begin, int64_t end) {
    if (p.dtype == DType::f32) return embed_rows_of<float>(p, begin, end);
    embed_rows_of<Bf16>(p, begin, end);
}

}  // namespace bytetx::cpu::BYTETX_SIMD
