// The position terms of disentangled attention: q[i] . pos_k and k[j] . pos_q of the 64 x 64 scores
// (i, j) of a tile's rows and a step of keys, between the matrix unit and the scores.
//
// The distances of a step are 127 neighbours, of which a block holds 64: block n has a row of a
// table for each of the distances tile row + 1 - 64 n and on. Keys from 64 n on meet two blocks,
//
//   n      "upper"   rows after their keys     i - j - 1       is the column,   i > j
//   n + 1  "lower"   rows up to their keys     i - j - 1 + 64                   i <= j
//
// so a column of a product with a block belongs to one score of each row, or to none. A thread of
// the matrix unit has columns of its rows; it writes them to where the thread that has the score
// reads:
//
//        q . pos_k, upper block          its scores
//        column    0 1 2 3               key  0 1 2 3
//        row 0     . . . .                    . . . .
//            1     a . . .                    a . . .
//            2     b c . .                    c b . .
//            3     d e f .                    f e d .
//
// Terms lie there as halves, by which three CTAs fit an SM.
#pragma once

#include <cuda_fp16.h>

#include "cuda/attention_mma.cuh"
#include "cuda/paged_mma.cuh"
#include "disentangled_ops.h"

namespace bytetx::attention {

// Where a query's terms begin, in terms. Padded, so that most of a warp's accesses fall on
// different banks.
constexpr int kTermStride = kTileRows + 8;

// One term of each score (i, j), at i * kTermStride + j.
using Terms = __half[kTileRows * kTermStride];

__device__ __forceinline__ int bucket_of(const DisentangledAttentionParams& p, int distance) {
    if (p.buckets == nullptr) return 0;
    const int clamped = min(max(distance, 1 - p.span), p.span - 1);
    return min(max(__ldg(p.buckets + clamped + p.span - 1), 0), p.num_buckets - 1);
}

// A thread's share of the rows of a block: eight features of each.
template <typename C>
struct BlockRows {
    static constexpr int kPieces = C::kDim / 8, kRowsAtOnce = C::kThreads / kPieces;
    static constexpr int kNum = kTileRows / kRowsAtOnce;
    int bucket[kNum];

    // first: the block's first distance.
    __device__ __forceinline__ void find(const DisentangledAttentionParams& p, int first) {
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            const int row = static_cast<int>(threadIdx.x) / kPieces + i * kRowsAtOnce;
            bucket[i] = bucket_of(p, first + row);
        }
    }

    // Asynchronous. A table that is not there has zeros, as have features past head_dim.
    __device__ __forceinline__ void copy(const DisentangledAttentionParams& p, int head,
                                         const void* table, typename C::Element* to) const {
        const int piece = static_cast<int>(threadIdx.x) % kPieces;
        const bool is_there = table != nullptr && piece * 8 < p.head_dim;
        const auto* from = static_cast<const uint16_t*>(is_there ? table : p.q);
        const int64_t stride = is_there ? int64_t{p.num_heads} * p.head_dim : 0;
        from += is_there ? head * p.head_dim + piece * 8 : 0;
        const uint32_t start = smem_address(to);
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            const int row = static_cast<int>(threadIdx.x) / kPieces + i * kRowsAtOnce;
            paged::copy_or_zero(start + tile_offset<C>(row, piece * 8), from + bucket[i] * stride,
                                is_there ? 16 : 0);
        }
    }
};

__device__ __forceinline__ void put_pair(__half* first, __half* second, bool has_first,
                                         bool has_second, float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    if (has_first) *first = __low2half(pair);
    if (has_second) *second = __high2half(pair);
}

// products: of the tile's queries (rows) and a block of pos_k (columns). kIsUpper: which of the two
// blocks of the step it is. A warp writes the terms of its own queries.
template <bool kIsUpper>
__device__ __forceinline__ void put_query_terms(const Sums<32>& products, Terms& terms, int warp,
                                                int lane) {
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
    // Where the thread's first column of its first row would be: key row + 63 - column of it.
    __half* to = terms + row * kTermStride + row + 63 - column - (kIsUpper ? 64 : 0);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        if (kIsUpper ? chunk > warp : chunk < warp) continue;  // columns of no score
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; i += 2) {
            const int half = i / 2 % 2, c = 8 * (i / 4);
            __half* at = to + half * 8 * (kTermStride + 1) - c;
            const int behind = c + column - row - 8 * half;  // column - row of the pair's first
            put_pair(at, at - 1, kIsUpper ? behind < 0 : behind >= 0,
                     kIsUpper ? behind + 1 < 0 : behind + 1 >= 0, products(i), products(i + 1));
        }
    }
}

// lower, upper: products of the step's keys (rows) and the two blocks of pos_q (columns). A warp
// writes the terms of its own keys: row j and column c of the lower block are query c + j - 63, of
// the upper one query c + j + 1.
__device__ __forceinline__ void put_key_terms(const Sums<32>& lower, const Sums<32>& upper,
                                              Terms& terms, int warp, int lane) {
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
    __half* to = terms + (row + column + 1) * kTermStride + row;  // in the upper block
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; i += 2) {
            const int half = i / 2 % 2, c = 8 * (i / 4);
            __half* high = to + half * 8 * (kTermStride + 1) + c * kTermStride;
            __half* low = high - 64 * kTermStride;
            const int behind = c + column + row + 8 * half - 63;  // query of the pair's first
            if (chunk >= 3 - warp) {
                put_pair(low, low + kTermStride, behind >= 0, behind + 1 >= 0, lower(i),
                         lower(i + 1));
            }
            if (chunk <= 3 - warp) {
                put_pair(high, high + kTermStride, behind < 0, behind + 1 < 0, upper(i),
                         upper(i + 1));
            }
        }
    }
}

// scores += both terms. A score with a term beyond the range of halves becomes NaN, whichever sign
// the term has: a weight of 0 would be taken for a right one.
__device__ __forceinline__ void add_terms(Sums<32>& scores, const Terms& query_terms,
                                          const Terms& key_terms, int warp, int lane) {
    const int at = (16 * warp + lane / 4) * kTermStride + 2 * (lane % 4);
    const auto pair_at = [](const __half* pair) {
        return __half22float2(*reinterpret_cast<const __half2*>(pair));
    };
    const auto add = [](float& score, float term) {
        score = fmaf(term, 0.0f, score + term);  // 0 * inf is NaN
    };
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const int offset = at + i / 2 % 2 * 8 * kTermStride + 8 * (i / 4);
        const float2 a = pair_at(query_terms + offset), b = pair_at(key_terms + offset);
        add(scores(i), a.x + b.x);
        add(scores(i + 1), a.y + b.y);
    }
}

}  // namespace bytetx::attention
