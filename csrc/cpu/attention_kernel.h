// Varlen attention of one query group, as a template over the instruction set.
//
//   out_i = sum_j softmax_j(scale * q_i . k_j + bias(i, j)) v_j     over the keys j of i's sequence
//
// Scores are computed transposed: vector lanes are queries, so that maximum, exp2 and sum run down
// the keys without one horizontal reduction, a key is one broadcast, and no key is ever masked
// (a length that is no multiple of the width costs only idle query lanes of its last tile).
//
//   packed once a group      q  [tile][word of d][query lane]        transposed in registers
//   packed once a key block  k  [key][word of d]                     v  [key pair][d]
//   tile of 32 queries       s  [key][query lane] f32  --exp2-->  p  [key pair][query lane], in
//   place
//
// A word is 32 bits: one f32, or with vdpbf16ps two neighbours (along d for q and k, along keys for
// p and v) that one instruction multiplies and adds.  So f32, widened bf16 and bf16 pairs are the
// same code.  The products' register tiles are (AVX-512) 12 keys x 32 queries for q.k and 8 queries
// x 2 or 3 vectors, or 4 queries x 4 vectors of d for p.v: 12 to 24 accumulators, enough to hide 6
// cycles of latency on two pipes, with at most 0.6 loads an instruction.
//
// Key blocks of kKeyBlock follow each other with a running maximum and sum (online softmax), so the
// scratch of a thread does not grow with the sequence.
//
// Bound by: the two products' multiply-add pipes, then exp2 (6 to 8 vector operations for 16
// scores, against head_dim / 16 multiply-adds with bf16 pairs).  Numbers: csrc/README.md.
// Source: FlashAttention (arXiv 2205.14135), section 3.1, with lanes along queries; zero padding as
// in ByteTransformer (arXiv 2210.03052).
//
// A file that includes this includes one attention_simd_*.h first.  Anonymous namespace: see there.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/attention_tile.h"

namespace {

using bytetx::VarlenAttentionParams;
using bytetx::cpu::AttentionItem;
using bytetx::cpu::kKeyBlock;
using bytetx::cpu::kMaxTileQueries;

// Where the rows of a tile and the keys of a block stand in their sequence.
struct Place {
    int64_t sequence_begin;  // token
    int first_query;         // within the sequence
    int num_queries;
    int first_key;
    int num_keys;
};

// The relative bias of key `key` for kWidth queries from `query` on; lanes without a query are 0.
template <class Isa>
typename Isa::Vec load_bias(const VarlenAttentionParams& p, const float* bias, const Place& at,
                            int key, int query) {
    const int center = p.relative_bias_span - 1;
    const int num_queries = at.first_query + at.num_queries - query;
    if (p.bias_positions == nullptr && num_queries >= Isa::kWidth) {
        return Isa::reverse(Isa::load(bias + center + key - query - (Isa::kWidth - 1)));
    }
    const int32_t* positions =
        p.bias_positions == nullptr ? nullptr : p.bias_positions + at.sequence_begin;
    float lanes[Isa::kWidth] = {};
    for (int i = 0; i < min_int(num_queries, Isa::kWidth); ++i) {
        const int distance =
            positions == nullptr ? key - query - i : positions[key] - positions[query + i];
        lanes[i] = bias[center + distance];
    }
    return Isa::load(lanes);
}

// s = scale * s + bias, and the maximum of that.  Without a bias the scale waits for the exponent;
// only a negative one, which would turn the maximum into a minimum, comes here as well.
template <class Isa, int kVectors>
void scale_scores(const Workspace<Isa>& w, const VarlenAttentionParams& p, const float* bias,
                  const Place& at, typename Isa::Vec (&maximum)[kVectors]) {
    const typename Isa::Vec scale = Isa::set1(p.softmax_scale);
    for (int v = 0; v < kVectors; ++v) {
        maximum[v] = Isa::set1(-__builtin_inff());
        for (int key = 0; key < at.num_keys; ++key) {
            float* s = w.scores + key * w.kTile + v * Isa::kWidth;
            const int query = at.first_query + v * Isa::kWidth;
            const typename Isa::Vec offset =
                bias == nullptr ? Isa::zero()
                                : load_bias<Isa>(p, bias, at, at.first_key + key, query);
            const typename Isa::Vec x = Isa::fma(Isa::load(s), scale, offset);
            maximum[v] = Isa::max(maximum[v], x);
            Isa::store(s, x);
        }
    }
}

// One tile of queries against the packed key block; `tile` is its first query within the group.
template <class Isa, int kVectors, typename T>
void attend_tile(const Workspace<Isa>& w, const VarlenAttentionParams& p, const float* bias,
                 const Operand& keys, const Operand& values, const Place& at, int tile,
                 const ValueTarget<T>& target) {
    typename Isa::Vec maximum[kVectors];
    for (int v = 0; v < kVectors; ++v) maximum[v] = Isa::set1(-__builtin_inff());
    score_block<Isa, kVectors>(w, w.query_tile(tile), keys, at.num_keys, maximum);
    float unit = p.softmax_scale * kLog2E;
    if (bias != nullptr || p.softmax_scale < 0) {
        scale_scores<Isa, kVectors>(w, p, bias, at, maximum);
        unit = kLog2E;
    }
    softmax_block<Isa, kVectors>(w, tile, at.num_keys, unit, target.is_first_block, maximum);
    value_block<Isa>(w, values, at.num_keys, tile, target);
}

// The item: every tile of its queries against every key block of its sequence.
template <class Isa, typename T>
void attend(const VarlenAttentionParams& p, const AttentionItem& item, float* scratch) {
    static_assert(Workspace<Isa>::kTile <= kMaxTileQueries && kKeyBlock % Isa::kPair == 0);
    const Workspace<Isa> w(p.head_dim, scratch);
    const int64_t begin = p.cu_seqlens[item.sequence];
    const int seqlen = p.cu_seqlens[item.sequence + 1] - p.cu_seqlens[item.sequence];
    const int64_t first_row = begin + item.first_query;
    const int kv_head = item.head / (p.num_heads / p.num_kv_heads);
    const T* q = static_cast<const T*>(p.q) + first_row * p.q_stride + item.head * p.head_dim;
    const T* k = static_cast<const T*>(p.k) + begin * p.k_stride + kv_head * p.head_dim;
    const T* v = static_cast<const T*>(p.v) + begin * p.v_stride + kv_head * p.head_dim;
    T* out = static_cast<T*>(p.out) + first_row * p.out_stride + item.head * p.head_dim;
    const float* bias = p.relative_bias;
    if (bias != nullptr) bias += item.head * (2 * int64_t{p.relative_bias_span} - 1);

    const int num_tiles = ceil_div(item.num_queries, w.kTile);
    for (int i = 0; i < item.num_queries; i += Isa::kWidth) {
        float* packed = w.query_tile(i / w.kTile * w.kTile) + i % w.kTile;
        pack_queries<Isa>(w, q + i * p.q_stride, p.q_stride, item.num_queries - i, packed);
    }
    for (int first_key = 0; first_key < seqlen; first_key += kKeyBlock) {
        const int num_keys = min_int(kKeyBlock, seqlen - first_key);
        const Operand keys =
            pack_keys(w, k + first_key * p.k_stride, p.k_stride, num_keys, num_tiles);
        const Operand values =
            pack_values(w, v + first_key * p.v_stride, p.v_stride, num_keys, num_tiles);
        for (int i = 0; i < item.num_queries; i += w.kTile) {
            const int num_rows = min_int(w.kTile, item.num_queries - i);
            const Place at{begin, item.first_query + i, num_rows, first_key, num_keys};
            const ValueTarget<T> target{out + i * p.out_stride, p.out_stride, num_rows,
                                        first_key == 0, first_key + num_keys == seqlen};
            if (num_rows > Isa::kWidth) {
                attend_tile<Isa, Isa::kScoreVectors>(w, p, bias, keys, values, at, i, target);
            } else {
                attend_tile<Isa, 1>(w, p, bias, keys, values, at, i, target);
            }
        }
    }
}

}  // namespace
