// The parts of pooling.cu: a sequence's rows, a warp's ring of rows in flight, and the warp that
// pools a sequence by itself.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx {
namespace {

constexpr int kPoolWarps = 8;
constexpr int kPoolThreads = kPoolWarps * kWarpSize;
constexpr int kLoads = 24;       // 16 bytes each, in a lane's ring: with 16, 3 % slower at 20 rows
constexpr int kWarpRows = 32;    // 7 rows on their way at a time; above, a CTA is faster
constexpr int kCtaRows = 256;    // above, blocks
constexpr int kBlockRows = 128;  // the largest that gives every SM work at 32k tokens
constexpr int64_t kCtas = 528;   // two rounds of two CTAs an SM even out lengths

// A sequence's rows; whatever cu_seqlens and first_tokens hold, they are rows of x.
struct RowRange {
    int64_t first;  // row of x
    int count;
    int index;  // position of the first row in its sequence
};

__device__ __forceinline__ RowRange kept_rows(const PoolParams& p, int32_t first, int32_t last,
                                              int32_t skipped) {
    const int64_t start = max(first, 0);
    const int64_t end = min(int64_t{last}, p.total_tokens);
    const int64_t skip = max(skipped, 0);
    RowRange rows{start + skip, static_cast<int>(max(end - start - skip, int64_t{0})),
                  static_cast<int>(skip)};
    if (p.mode == PoolMode::lasttoken && rows.count > 0) rows.first = end - 1;
    const bool is_one = p.mode == PoolMode::cls || p.mode == PoolMode::lasttoken;
    if (is_one) rows.count = min(rows.count, 1);
    return rows;
}

__device__ __forceinline__ RowRange kept_rows(const PoolParams& p, int64_t sequence) {
    return kept_rows(p, p.cu_seqlens[sequence], p.cu_seqlens[sequence + 1],
                     p.first_tokens != nullptr ? p.first_tokens[sequence] : 0);
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    return a > b || a != a ? a : b;  // b where b is NaN
}

template <bool kIsMax>
constexpr float kNeutral = kIsMax ? -__builtin_inff() : 0.0f;

// One over what a sum of these rows is divided by; zero where there are none.
__device__ __forceinline__ float scale_of(PoolMode mode, const RowRange& rows) {
    if (rows.count == 0) return 0.0f;
    const float count = static_cast<float>(rows.count);
    if (mode == PoolMode::mean) return 1.0f / count;
    if (mode == PoolMode::mean_sqrt_len_tokens) return 1.0f / sqrtf(count);
    if (mode != PoolMode::weightedmean) return 1.0f;
    return 1.0f /
           static_cast<float>(int64_t{rows.count} * (2 * int64_t{rows.index} + rows.count + 1) / 2);
}

// The columns that a warp holds at a time: kTiles times an access of each lane.
template <int kElems_, int kTiles_>
struct Columns {
    static constexpr int kElems = kElems_;
    static constexpr int kTiles = kTiles_;
    static constexpr int kTile = kWarpSize * kElems;
    static constexpr int kSpan = kTile * kTiles;
    static constexpr int kQuad = kElems == 1 ? 1 : 4;  // f32 columns that are stored at a time
};

template <typename C>
using Sums = float[C::kTiles][C::kElems];

template <int kQuad>
struct alignas(4 * kQuad) Quad {
    float value[kQuad];
};

// A warp's rows on their way. A lane copies what it alone reads, so no barrier is needed; a warp's
// sums lie here, too, once its rows have been read.
template <typename C>
struct alignas(kVecBytes) Ring {
    static constexpr int kRows = kLoads / C::kTiles;
    union {
        uint4 rows[kRows][C::kTiles][kWarpSize];
        float sums[C::kSpan];
    };
};

template <bool kIsMax, typename C>
__device__ __forceinline__ void add_row(Sums<C>& sums, float weight, const auto& get) {
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < C::kElems; ++j) {
            const float v = get(t, j);
            sums[t][j] = kIsMax ? max_or_nan(sums[t][j], v) : fmaf(v, weight, sums[t][j]);
        }
    }
}

// This lane's columns, joined over rows first, first + gap, ... in order.
template <typename T, typename C, bool kIsMax>
__device__ __forceinline__ void reduce_rows(const PoolParams& p, const RowRange& rows, int first,
                                            int gap, int64_t column, Ring<C>& ring, Sums<C>& sums) {
    constexpr int kRows = Ring<C>::kRows;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const bool is_weighted = p.mode == PoolMode::weightedmean;
    const T* x = static_cast<const T*>(p.x) + (rows.first + first) * p.hidden_size + column;
    const int64_t stride = gap * p.hidden_size;
    const auto width = static_cast<int>(min(p.hidden_size - column, int64_t{C::kSpan}));
    const auto weight_of = [&](int row) {
        return is_weighted ? static_cast<float>(rows.index + row + 1) : 1.0f;
    };
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < C::kElems; ++j) sums[t][j] = kNeutral<kIsMax>;
    }
    if constexpr (C::kElems == 1) {
#pragma unroll 4
        for (int row = first; row < rows.count; row += gap, x += stride) {
            add_row<kIsMax, C>(sums, weight_of(row), [&](int t, int) {
                return t * C::kTile < width ? static_cast<float>(x[t * C::kTile]) : 0.0f;
            });
        }
    } else {
        int next = first;  // row to be copied, to `slot`
        int slot = 0;
        const auto copy_next = [&] {
            if (next < rows.count) {
#pragma unroll
                for (int t = 0; t < C::kTiles; ++t) {
                    if (t * C::kTile < width)
                        copy_async(&ring.rows[slot][t][lane], x + t * C::kTile);
                }
            }
            commit_copies();
            next += gap;
            x += stride;
            slot = slot + 1 == kRows ? 0 : slot + 1;
        };
#pragma unroll
        for (int i = 0; i < kRows - 1; ++i) copy_next();
        int ready = 0;
        for (int row = first; row < rows.count; row += gap) {
            wait_for_copies<kRows - 2>();
            add_row<kIsMax, C>(sums, weight_of(row), [&](int t, int j) {
                return element<T>(ring.rows[ready][t][lane], j);
            });
            ready = ready + 1 == kRows ? 0 : ready + 1;
            copy_next();  // over the row before this one
        }
    }
}

__device__ __forceinline__ float inverse_norm(float squares) {
    const float scale = 1.0f / max_or_nan(sqrtf(squares), 1e-12f);
    return scale == 0.0f ? __int_as_float(0x7fffffff) : scale;  // NaN: the norm overflowed
}

template <typename C, bool kIsMax>
__device__ __forceinline__ void join(Quad<C::kQuad>& total, const Quad<C::kQuad>& other) {
#pragma unroll
    for (int j = 0; j < C::kQuad; ++j) {
        total.value[j] =
            kIsMax ? max_or_nan(total.value[j], other.value[j]) : total.value[j] + other.value[j];
    }
}

template <typename T, typename C, bool kIsMax>
__device__ __forceinline__ void pool_by_warp(const PoolParams& p, const RowRange& rows,
                                             Ring<C>& ring, float* out) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float scale = scale_of(p.mode, rows);
    // Visits this lane's columns of the span that starts at column `span`; they lie in quads.
    const auto each_quad = [&](int64_t span, const auto& f) {
#pragma unroll
        for (int t = 0; t < C::kTiles; ++t) {
            const int64_t column = span + t * C::kTile + lane * C::kElems;
            if (column >= p.hidden_size) continue;
#pragma unroll
            for (int j = 0; j < C::kElems; j += C::kQuad) {
                f(t, j, reinterpret_cast<Quad<C::kQuad>*>(out + column + j));
            }
        }
    };
    float squares = 0.0f;
    for (int64_t span = 0; span < p.hidden_size; span += C::kSpan) {
        Sums<C> sums;
        reduce_rows<T, C, kIsMax>(p, rows, 0, 1, span + lane * C::kElems, ring, sums);
        each_quad(span, [&](int t, int j, auto*) {
#pragma unroll
            for (int i = 0; i < C::kQuad; ++i) {
                sums[t][j + i] = rows.count > 0 ? sums[t][j + i] * scale : 0.0f;
                squares = fmaf(sums[t][j + i], sums[t][j + i], squares);
            }
        });
        const bool is_last = span + C::kSpan >= p.hidden_size;
        const float factor =
            is_last && p.normalize ? inverse_norm(row_sum<kWarpSize>(squares)) : 1.0f;
        each_quad(span, [&](int t, int j, Quad<C::kQuad>* to) {
            Quad<C::kQuad> quad;
#pragma unroll
            for (int i = 0; i < C::kQuad; ++i) quad.value[i] = sums[t][j + i] * factor;
            *to = quad;
        });
        if (!is_last || !p.normalize) continue;
        for (int64_t before = 0; before < span; before += C::kSpan) {
            each_quad(before, [&](int, int, Quad<C::kQuad>* to) {
                Quad<C::kQuad> quad = *to;
#pragma unroll
                for (int i = 0; i < C::kQuad; ++i) quad.value[i] *= factor;
                *to = quad;
            });
        }
    }
}

}  // namespace
}  // namespace bytetx
