// The kernels of pool, included by one file for each instruction set.
//
// A sequence's rows are reduced in f32, eight rows at a time over a block of columns: the eight are
// reduced in registers, the running result of the block lives in L1. Sums have three levels (8
// rows, 16 such groups, the rest), so that a sequence of thousands of tokens carries the rounding
// error of a few dozen additions. Bytes: each kept row read once; bound by the memory it comes
// from. The result of a sequence depends on nothing but its rows. Source: standard.
#pragma once

#include "cpu/row_norm.h"
#include "cpu/rows.h"

namespace bytetx::cpu::BYTETX_SIMD {

constexpr int kPoolRows = 8;            // rows reduced in registers
constexpr int64_t kPoolGroups = 16;     // groups of kPoolRows between two additions to the total
constexpr int64_t kPoolColumns = 1024;  // columns at a time: 4 KiB of running results, in L1

enum class Reduction { sum, weighted_sum, max };

struct RowRange {
    int64_t first;  // row of x
    int64_t count;
    int64_t index;  // position of the first row in its sequence
};

inline RowRange kept_rows(const PoolParams& p, int64_t sequence) {
    const int64_t start = p.cu_seqlens[sequence];
    const int64_t skip = p.first_tokens != nullptr ? p.first_tokens[sequence] : 0;
    const int64_t count = p.cu_seqlens[sequence + 1] - start - skip;
    return {start + skip, count > 0 ? count : 0, skip};
}

// running[0, n) = running (+ or max) of kCount rows; `index` weighs the first one (plus one).
template <typename T, Reduction kReduction, int kCount>
inline void reduce_group(const T* x, int64_t stride, int64_t index, int64_t n, float* running) {
    for (int64_t i = 0; i < n; i += Vec::kWidth) {
        const bool is_whole = n - i >= Vec::kWidth;
        const int rest = static_cast<int>(n - i);
        Vec group = broadcast(0.0f);
        for (int r = 0; r < kCount; ++r) {
            const T* row = x + r * stride + i;
            const Vec v = is_whole ? load(row) : load_first(row, rest);
            if constexpr (kReduction == Reduction::weighted_sum) {
                group = multiply_add(v, broadcast(static_cast<float>(index + r + 1)), group);
            } else if constexpr (kReduction == Reduction::sum) {
                group = r == 0 ? v : group + v;
            } else {
                group = r == 0 ? v : max_or_nan(group, v);
            }
        }
        const Vec before = load(running + i);
        store(running + i,
              kReduction == Reduction::max ? max_or_nan(before, group) : before + group);
    }
}

// out[0, n) = the reduction of the rows over a block of at most kPoolColumns columns.
template <typename T, Reduction kReduction>
inline void reduce_block(const T* x, int64_t stride, const RowRange& rows, int64_t n, float* out) {
    alignas(64) float total[kPoolColumns + Vec::kWidth];
    alignas(64) float running[kPoolColumns + Vec::kWidth];
    const Vec start = broadcast(kReduction == Reduction::max ? -__builtin_inff() : 0.0f);
    for (int64_t i = 0; i < n; i += Vec::kWidth) {
        store(total + i, start);
        store(running + i, start);
    }
    for (int64_t row = 0; row < rows.count;) {
        for (int64_t g = 0; g < kPoolGroups && row < rows.count; ++g) {
            const T* at = x + row * stride;
            const int64_t index = rows.index + row;
            if (rows.count - row >= kPoolRows) {
                reduce_group<T, kReduction, kPoolRows>(at, stride, index, n, running);
                row += kPoolRows;
            } else {
                reduce_group<T, kReduction, 1>(at, stride, index, n, running);
                row += 1;
            }
        }
        for (int64_t i = 0; i < n; i += Vec::kWidth) {
            const Vec before = load(total + i);
            const Vec block = load(running + i);
            store(total + i,
                  kReduction == Reduction::max ? max_or_nan(before, block) : before + block);
            store(running + i, start);
        }
    }
    store_row(total, n, out);
}

// Factor of the sum: 1 / tokens, 1 / sqrt(tokens) or 1 / (sum of weights).
inline float sum_scale(PoolMode mode, const RowRange& rows) {
    const double count = static_cast<double>(rows.count);
    if (mode == PoolMode::mean) return static_cast<float>(1.0 / count);
    if (mode == PoolMode::mean_sqrt_len_tokens) {
        return 1.0f / square_root(static_cast<float>(count));
    }
    const double first = static_cast<double>(rows.index + 1);
    return static_cast<float>(1.0 / (count * (first + first + count - 1.0) / 2.0));
}

template <typename T>
inline void widen_row(const T* x, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(out + i, load(x + i));
    if (i == n) return;
    const int rest = static_cast<int>(n - i);
    store_first(out + i, rest, load_first(x + i, rest));
}

inline void scale_row(float* x, int64_t n, float scale) {
    const Vec factor = broadcast(scale);
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(x + i, load(x + i) * factor);
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        store_first(x + i, rest, load_first(x + i, rest) * factor);
    }
}

// out[0, n) = one block of columns of a sequence that has rows.
template <typename T>
inline void pool_block(PoolMode mode, const T* x, int64_t stride, const RowRange& rows, int64_t n,
                       float* out) {
    switch (mode) {
        case PoolMode::cls:
            return widen_row(x, n, out);
        case PoolMode::lasttoken:
            return widen_row(x + (rows.count - 1) * stride, n, out);
        case PoolMode::max:
            return reduce_block<T, Reduction::max>(x, stride, rows, n, out);
        case PoolMode::weightedmean:
            reduce_block<T, Reduction::weighted_sum>(x, stride, rows, n, out);
            break;
        default:
            reduce_block<T, Reduction::sum>(x, stride, rows, n, out);
    }
    scale_row(out, n, sum_scale(mode, rows));
}

template <typename T>
inline void pool_columns_of(const PoolParams& p, int64_t sequence, int64_t begin, int64_t end) {
    const RowRange rows = kept_rows(p, sequence);
    const int64_t stride = p.hidden_size;
    float* out = p.out + sequence * stride;
    if (rows.count == 0) {
        for (int64_t i = begin; i < end; ++i) out[i] = 0.0f;
        return;
    }
    const T* x = static_cast<const T*>(p.x) + rows.first * stride;
    for (int64_t i = begin; i < end; i += kPoolColumns) {
        const int64_t n = end - i < kPoolColumns ? end - i : kPoolColumns;
        pool_block(p.mode, x + i, stride, rows, n, out + i);
    }
}

inline void pool_columns(const PoolParams& p, int64_t sequence, int64_t begin, int64_t end) {
    if (p.dtype == DType::f32) return pool_columns_of<float>(p, sequence, begin, end);
    pool_columns_of<Bf16>(p, sequence, begin, end);
}

inline void normalize_vector(float* x, int64_t n) {
    Vec squares = broadcast(0.0f);
    for (int64_t i = 0; i < n; i += Vec::kWidth) {
        const int rest = static_cast<int>(n - i);
        const Vec v = rest >= Vec::kWidth ? load(x + i) : load_first(x + i, rest);
        squares = multiply_add(v, v, squares);
    }
    const float norm = square_root(reduce_sum(squares));
    const float scale = 1.0f / (norm > 1e-12f || norm != norm ? norm : 1e-12f);
    scale_row(x, n, scale == 0.0f ? __builtin_nanf("") : scale);  // the norm overflowed
}

}  // namespace bytetx::cpu::BYTETX_SIMD
