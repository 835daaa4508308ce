// Varlen attention of one query group, as a template over the instruction set.
//
//   out_i = sum_j softmax_j(cap(scale * q_i . k_j) + bias(i, j)) v_j    over the keys j of i's
//                                                                       sequence
//
// With sinks, a head's sink is one more score of the softmax, and has no value.
//
// Scores are computed transposed: vector lanes are queries, so that maximum, exp2 and sum run down
// the keys without one horizontal reduction, a key is one broadcast, and no key is masked for a
// length's sake (one that is no multiple of the width costs only idle query lanes of its last
// tile).
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
// Causal rows and windows: a tile takes of each block the keys that one of its rows sees, and hides
// from each row what it does not see by weights of exactly 0.  Blocks lie on a grid of keys, and
// the first key of a tile is even, so that a row meets its keys in the same order, and pairs,
// whatever other rows are in its tile: a prompt in pieces has the bits of the prompt at once.
//
// Bound by: the two products' multiply-add pipes, then exp2 (6 to 8 vector operations for 16
// scores, against head_dim / 16 multiply-adds with bf16 pairs).  Numbers: docs/kernels/cpu.md.
// Source: FlashAttention (arXiv 2205.14135), section 3.1, with lanes along queries; zero padding as
// in ByteTransformer (arXiv 2210.03052).
//
// A file that includes this includes one attention_simd_*.h first.  Anonymous namespace: see there.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/attention_decode.h"
#include "cpu/attention_position.h"
#include "cpu/attention_tile.h"

namespace {

using bytetx::cpu::AttentionInput;
using bytetx::cpu::AttentionItem;
using bytetx::cpu::AttentionKernels;
using bytetx::cpu::kKeyBlock;
using bytetx::cpu::kMaxTileQueries;

// Keys that one row at least of a run of them sees.
struct KeyRange {
    int begin;  // even
    int end;
};

inline KeyRange visible_keys(const AttentionInput& in, int num_keys, int first_query,
                             int num_queries) {
    const int before = in.window > 0 ? first_query - in.window + 1 : 0;
    int end = num_keys;
    if (in.causal) {
        end = min_int(end, first_query + num_queries);
    } else if (in.window > 0) {
        end = min_int(end, first_query + num_queries - 1 + in.window);
    }
    return {before > 0 ? before & ~1 : 0, end};
}

// The relative bias of key `key` for kWidth queries from `query` on; lanes without a query are 0.
template <class Isa>
typename Isa::Vec load_bias(const AttentionInput& p, const float* bias, const Place& at, int key,
                            int query) {
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

// s = change(s, key, its first query), and the maximum of that.
template <class Isa, int kVectors, typename Change>
void change_scores(const Workspace<Isa>& w, const Place& at, typename Isa::Vec (&maximum)[kVectors],
                   Change&& change) {
    for (int v = 0; v < kVectors; ++v) {
        maximum[v] = Isa::set1(-__builtin_inff());
        for (int key = 0; key < at.num_keys; ++key) {
            float* s = w.scores + key * w.kTile + v * Isa::kWidth;
            const typename Isa::Vec x =
                change(Isa::load(s), at.first_key + key, at.first_query + v * Isa::kWidth);
            maximum[v] = Isa::max(maximum[v], x);
            Isa::store(s, x);
        }
    }
}

// s = cap(scale * s) + bias + slope * (key - query), and the maximum of that.  Without these the
// scale waits for the exponent; only a negative one, which would turn the maximum into a minimum,
// comes here as well.
template <class Isa, int kVectors>
void scale_scores(const Workspace<Isa>& w, const AttentionInput& p, int head, const float* bias,
                  const Place& at, typename Isa::Vec (&maximum)[kVectors]) {
    using Vec = typename Isa::Vec;
    if (p.softcap > 0) {
        const Vec to_unit = Isa::set1(p.softmax_scale / p.softcap), cap = Isa::set1(p.softcap);
        change_scores<Isa, kVectors>(w, at, maximum, [=](Vec x, int, int) {
            return Isa::mul(cap, tanh<Isa>(Isa::mul(x, to_unit)));
        });
    }
    const Vec scale = Isa::set1(p.softcap > 0 ? 1.0f : p.softmax_scale);
    if (bias != nullptr) {
        change_scores<Isa, kVectors>(w, at, maximum, [&](Vec x, int key, int query) {
            return Isa::fma(x, scale, load_bias<Isa>(p, bias, at, key, query));
        });
    } else if (p.alibi_slopes != nullptr) {
        const Vec slope = Isa::set1(p.alibi_slopes[head]), lanes = minus_lanes<Isa>();
        change_scores<Isa, kVectors>(w, at, maximum, [=](Vec x, int key, int query) {
            const Vec distance = Isa::add(Isa::set1(static_cast<float>(key - query)), lanes);
            return Isa::fma(x, scale, Isa::mul(slope, distance));
        });
    } else if (!(p.softcap > 0)) {
        change_scores<Isa, kVectors>(w, at, maximum,
                                     [=](Vec x, int, int) { return Isa::mul(x, scale); });
    }
}

// Whether scores are not what the exponent's factor alone makes of them.
inline bool changes_scores(const AttentionInput& in) {
    return in.relative_bias != nullptr || in.alibi_slopes != nullptr || in.softcap > 0 ||
           in.softmax_scale < 0 ||
           // 0 would show hidden keys, and give a sink no place among the scores.
           (in.softmax_scale == 0 && (in.causal || in.window > 0 || in.sinks != nullptr));
}

// `count` lanes of kHidden and zeros after them, or the other way round; count is clamped.
template <class Isa>
typename Isa::Vec hide_lanes(int count, bool is_first) {
    static constexpr auto lanes = [] {
        struct {
            float x[3 * Isa::kWidth];
        } table{};
        for (int i = Isa::kWidth; i < 2 * Isa::kWidth; ++i) table.x[i] = kHidden;
        return table;
    }();
    const int n = count < 0 ? 0 : min_int(count, Isa::kWidth);
    return Isa::load(lanes.x + (is_first ? 2 : 1) * Isa::kWidth - n);
}

// Hides from each row the keys after it (causal) and those outside its window; the maximum of the
// rest.
template <class Isa, int kVectors>
void hide_keys(const Workspace<Isa>& w, const AttentionInput& in, const Place& at,
               typename Isa::Vec (&maximum)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) {
        maximum[v] = Isa::set1(kHidden / 2);
        const int query = at.first_query + v * Isa::kWidth;
        for (int key = 0; key < at.num_keys; ++key) {
            float* s = w.scores + key * w.kTile + v * Isa::kWidth;
            const int ahead =
                at.first_key + key - query;  // causal: lanes below it do not see the key
            typename Isa::Vec x = Isa::load(s);
            if (in.causal) {
                x = Isa::add(x, hide_lanes<Isa>(ahead, true));
            } else if (in.window > 0) {
                x = Isa::add(x, hide_lanes<Isa>(ahead - in.window + 1, true));
            }
            if (in.window > 0) x = Isa::add(x, hide_lanes<Isa>(ahead + in.window, false));
            maximum[v] = Isa::max(maximum[v], x);
            Isa::store(s, x);
        }
    }
}

// Whether a row of the tile does not see every key of the block.
inline bool has_hidden_keys(const AttentionInput& in, const Place& at) {
    const int last_query = at.first_query + at.num_queries - 1;
    const int last_key = at.first_key + at.num_keys - 1;
    if (in.window > 0 && at.first_key <= last_query - in.window) return true;
    if (in.causal) return last_key > at.first_query;
    return in.window > 0 && last_key >= at.first_query + in.window;
}

// One tile of queries against the packed key block; `tile` is its first query within the group.
template <class Isa, int kVectors, typename T>
void attend_tile(const Workspace<Isa>& w, const AttentionInput& in, int head, const float* bias,
                 float* position_scratch, const Operand& keys, const Operand& values,
                 const Place& at, int tile, const ValueTarget<T>& target) {
    typename Isa::Vec maximum[kVectors];
    for (int v = 0; v < kVectors; ++v) maximum[v] = Isa::set1(-__builtin_inff());
    const float* q = w.query_tile(tile);
    score_block<Isa, kVectors>(w, q, keys, at.num_keys, maximum);
    if (in.buckets != nullptr) {
        add_position_scores<Isa, kVectors, T>(w, in, head, position_scratch, q, keys, at, maximum);
    }
    float unit = in.softmax_scale * kLog2E;
    if (changes_scores(in)) {
        scale_scores<Isa, kVectors>(w, in, head, bias, at, maximum);
        unit = kLog2E;
    }
    if (has_hidden_keys(in, at)) hide_keys<Isa, kVectors>(w, in, at, maximum);
    Sink sink{in.sinks != nullptr, 0.0f, 0.0f};
    if (sink.is_there) {
        sink.value = max_float(in.sinks[head], kHidden / 2);
        sink.score = max_float(sink.value * (kLog2E / unit), kHidden / 2);
    }
    softmax_block<Isa, kVectors>(w, tile, at.num_keys, unit, target.is_first_block, sink, maximum);
    value_block<Isa>(w, values, at.num_keys, tile, target);
}

// keys and values from codes.
template <class Isa, typename T>
void pack_codes(const Workspace<Isa>& w, const AttentionInput& in, int sequence, int kv_head,
                int first_key, int num_keys, int num_tiles, float* scratch, Operand& keys,
                Operand& values) {
    using R = Restored<Isa, T>;
    const AttentionScratch sizes(in.head_dim);
    const int64_t stride = sizes.row_words;
    auto* restored = reinterpret_cast<R*>(scratch + sizes.own_words());
    auto* second = reinterpret_cast<R*>(scratch + sizes.own_words() + sizes.keys_words());
    restore_rows<Isa>(code_rows(in, in.k, in.k_scales, in.k_stride, sequence, kv_head), first_key,
                      num_keys, in.head_dim, restored, stride);
    restore_rows<Isa>(code_rows(in, in.v, in.v_scales, in.v_stride, sequence, kv_head), first_key,
                      num_keys, in.head_dim, second, stride);
    keys = pack_keys(w, KeyRows<R>{restored, stride, nullptr, 0}, 0, num_keys, num_tiles);
    values = pack_values(w, KeyRows<R>{second, stride, nullptr, 0}, 0, num_keys, num_tiles);
}

// The item: every tile of its queries against every key block of its sequence that it sees.
template <class Isa, typename T>
void attend(const AttentionInput& in, const AttentionItem& item, float* scratch) {
    static_assert(Workspace<Isa>::kTile <= kMaxTileQueries && kKeyBlock % Isa::kPair == 0);
    const Workspace<Isa> w(in.head_dim, scratch);
    const int64_t begin = in.cu_seqlens[item.sequence];
    const int total_keys = in.num_keys(item.sequence);
    const int position = total_keys - in.num_queries(item.sequence) + item.first_query;
    const int64_t first_row = begin + item.first_query;
    const int kv_head = item.head / (in.num_heads / in.num_kv_heads);
    const T* q = static_cast<const T*>(in.q) + first_row * in.q_stride + item.head * in.head_dim;
    const KeyRows<T> k = key_rows<T>(in, in.k, in.k_stride, item.sequence, kv_head);
    const KeyRows<T> v = key_rows<T>(in, in.v, in.v_stride, item.sequence, kv_head);
    T* out = static_cast<T*>(in.out) + first_row * in.out_stride + item.head * in.head_dim;
    float* positions = scratch + AttentionScratch(in.head_dim).words();
    const float* bias = in.relative_bias;
    if (bias != nullptr) bias += item.head * (2 * int64_t{in.relative_bias_span} - 1);

    const int num_tiles = ceil_div(item.num_queries, w.kTile);
    for (int i = 0; i < item.num_queries; i += Isa::kWidth) {
        float* packed = w.query_tile(i / w.kTile * w.kTile) + i % w.kTile;
        pack_queries<Isa>(w, q + i * in.q_stride, in.q_stride, item.num_queries - i, packed);
    }
    const KeyRange all = visible_keys(in, total_keys, position, item.num_queries);
    for (int first_key = all.begin, end; first_key < all.end; first_key = end) {
        end = min_int((first_key / kKeyBlock + 1) * kKeyBlock, all.end);
        Operand keys, values;
        if (in.k_scales == nullptr) {
            keys = pack_keys(w, k, first_key, end - first_key, num_tiles);
            values = pack_values(w, v, first_key, end - first_key, num_tiles);
        } else {
            pack_codes<Isa, T>(w, in, item.sequence, kv_head, first_key, end - first_key, num_tiles,
                               scratch, keys, values);
        }
        for (int i = 0; i < item.num_queries; i += w.kTile) {
            const int num_rows = min_int(w.kTile, item.num_queries - i);
            const KeyRange seen = visible_keys(in, total_keys, position + i, num_rows);
            const int skipped = seen.begin > first_key ? seen.begin - first_key : 0;
            const int num_keys = min_int(end, seen.end) - first_key - skipped;
            if (num_keys <= 0) continue;
            const Operand own_keys{keys.words + skipped * keys.stride, keys.stride};
            const Operand own_values{values.words + skipped / Isa::kPair * values.stride,
                                     values.stride};
            const Place at{begin, position + i, num_rows, first_key + skipped, num_keys};
            const ValueTarget<T> target{out + i * in.out_stride, in.out_stride, num_rows,
                                        seen.begin >= first_key, seen.end <= end};
            if (num_rows > Isa::kWidth) {
                attend_tile<Isa, Isa::kScoreVectors>(w, in, item.head, bias, positions, own_keys,
                                                     own_values, at, i, target);
            } else {
                attend_tile<Isa, 1>(w, in, item.head, bias, positions, own_keys, own_values, at, i,
                                    target);
            }
        }
    }
}

template <class Isa, typename T>
AttentionKernels attention_kernels() {
    return {attend<Isa, T>, decode<Isa, T>, merge_decoded<Isa, T>};
}

}  // namespace
