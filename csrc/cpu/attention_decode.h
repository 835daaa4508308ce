// Attention of one query row over many keys, for the query heads that share one head of k and v.
//
//   out_h = sum_j softmax_j(cap(scale * q_h . k_j) + slope_h * (j - i)) v_j
//
// over a run of up to kDecodeKeys keys j of the row i
//
// With one row, lanes along queries (attention_kernel.h) would idle.  Here they run along d for
// both products, so that k and v are read where they lie, once for all heads of the group:
//
//   scores   kWidth keys at a time: kWidth accumulators over d, one transposition, one tree of sums
//   values   up to 4 heads x 4 vectors (or 1 x 8) of d: a row of v is widened to f32 once, weights
//            are f32 broadcasts
//
// kBlockKeys keys go through all heads before the next ones do, so that their rows, which hold all
// heads, are read from memory once and whole.  No hardware prefetcher follows one head through
// them: a head's rows of v are fetched into L1 while its keys are scored, and the next head's rows
// of k while the values are added.  A run of keys ends in (maximum, sum, unnormalised output); runs
// are merged in their order, so the result depends on nothing but the row's own keys.
//
// Bound by: memory, where k and v do not lie in a cache.  Numbers: docs/kernels/cpu.md.
// Source: FlashDecoding (pytorch.org, 2023), the split along keys; lanes along d are standard.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/attention_rows.h"
#include "cpu/attention_tile.h"

namespace {

using bytetx::cpu::DecodeItem;
using bytetx::cpu::kMaxTileQueries;

constexpr int kBlockKeys = 64;                 // in f32 at d = 128, 32 KiB of k and of v
constexpr int kDecodeHeads = kMaxTileQueries;  // heads of a group at once; larger groups take turns

// Buffers of one item in the thread's scratch; rows of `stride` words, a row a head.
struct DecodeState {
    int stride;
    float* queries;  // words, zeros behind head_dim
    float* scores;   // [head][kBlockKeys], then weights
    float* output;
    float* maximum;  // in units of log2
    float* sum;

    DecodeState(int head_dim, float* scratch) {
        const AttentionScratch sizes(head_dim);
        stride = static_cast<int>(sizes.row_words);
        scores = scratch;
        queries = scores + sizes.scores_words();
        output = queries + sizes.queries_words();
        maximum = output + sizes.queries_words();
        sum = maximum + kGroupQueries;
    }
    DecodeState from(int head) const {
        DecodeState s = *this;
        s.queries += int64_t{head} * stride;
        s.output += int64_t{head} * stride;
        s.maximum += head;
        s.sum += head;
        return s;
    }
};

template <typename T>
inline void prefetch_row(const T* row, int head_dim) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t i = 0; i < head_dim * int64_t{sizeof(T)}; i += 64) __builtin_prefetch(bytes + i);
}

// Rows of a block's keys, at the first head of the item, and the head that is in work.
template <typename T>
struct DecodeRows {
    const T* keys[kBlockKeys];
    const T* values[kBlockKeys];
    const T* next_keys[kBlockKeys];  // keys of the next block
    int64_t offset;                  // elements from the first head to this one
    const T* const* ahead;           // rows of k that come next, and the offset of their head
    int64_t ahead_offset;
};

// Lane i: the product of q and rows[i].
template <class Isa, typename T>
inline typename Isa::Vec dot_rows(const T* const* rows, int64_t offset, const float* q,
                                  int head_dim) {
    constexpr int kWidth = Isa::kWidth;
    constexpr int kStep = kWidth * Isa::kPair;
    typename Isa::Vec acc[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) acc[i] = Isa::zero();
    const auto add = [&](int element, int count) {
        const typename Isa::Vec words = Isa::load(q + element / Isa::kPair);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
            acc[i] = Isa::dot(acc[i], Isa::load_words(rows[i] + offset + element, count), words);
        }
    };
    int element = 0;
    for (; element + kStep <= head_dim; element += kStep) add(element, kStep);
    if (element < head_dim) add(element, head_dim - element);
    Isa::transpose(acc);
#pragma GCC unroll 4
    for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) acc[i] = Isa::add(acc[i], acc[i + half]);
    }
    return acc[0];
}

template <class Isa, bool kIsMaximum>
inline float reduce(typename Isa::Vec x) {
    float lanes[Isa::kWidth];
    Isa::store(lanes, x);
    for (int half = Isa::kWidth / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            const float other = lanes[i + half];
            if (kIsMaximum) {
                lanes[i] = other > lanes[i] ? other : lanes[i];
            } else {
                lanes[i] += other;
            }
        }
    }
    return lanes[0];
}

// Turns products of q and k into scores, in units of log2.
struct DecodeScores {
    float unit;
    float softcap;        // in units of log2; 0: none
    const float* slopes;  // slopes of the block's heads, or null for none
    int distance;         // position of the block's first key minus the row's

    bool is_plain() const { return softcap == 0 && slopes == nullptr; }
};

// cap(score) + slope * distance of kWidth keys from `key` on.
template <class Isa>
inline typename Isa::Vec change_decoded(const DecodeScores& how, typename Isa::Vec score, int head,
                                        int key) {
    if (how.softcap > 0) {
        const typename Isa::Vec to_unit = Isa::set1(1.0f / how.softcap);
        score = Isa::mul(Isa::set1(how.softcap), tanh<Isa>(Isa::mul(score, to_unit)));
    }
    if (how.slopes == nullptr) return score;
    const typename Isa::Vec distance =
        Isa::sub(Isa::set1(static_cast<float>(how.distance + key)), minus_lanes<Isa>());
    return Isa::fma(Isa::set1(how.slopes[head] * kLog2E), distance, score);
}

// Scores of a block in units of log2, for each head; kHidden behind the last key.
template <class Isa, bool kPlain, typename T>
void score_decoded(const DecodeState& s, const DecodeRows<T>& rows, int num_keys, int num_heads,
                   const DecodeScores& how, int head_dim) {
    const typename Isa::Vec units = Isa::set1(how.unit);
    for (int key = 0; key < num_keys; key += Isa::kWidth) {
        for (int i = key; i < min_int(key + Isa::kWidth, num_keys); ++i) {
            prefetch_row(rows.values[i] + rows.offset, head_dim);
        }
        for (int head = 0; head < num_heads; ++head) {
            const float* q = s.queries + head * s.stride;
            float* scores = s.scores + head * kBlockKeys + key;
            typename Isa::Vec score =
                Isa::mul(units, dot_rows<Isa>(rows.keys + key, rows.offset, q, head_dim));
            if constexpr (!kPlain) score = change_decoded<Isa>(how, score, head, key);
            Isa::store(scores, score);
            for (int i = num_keys - key; i < Isa::kWidth; ++i) scores[i] = kHidden;
        }
    }
}

// Scores of one head to weights in place; returns what the outputs so far are to be multiplied by.
template <class Isa>
float soften_decoded(const DecodeState& s, int head, int num_keys, bool is_first) {
    using Vec = typename Isa::Vec;
    float* scores = s.scores + head * kBlockKeys;
    Vec largest = Isa::load(scores);
    for (int key = Isa::kWidth; key < num_keys; key += Isa::kWidth) {
        largest = Isa::max(largest, Isa::load(scores + key));
    }
    const float before = s.maximum[head];
    float now = reduce<Isa, true>(largest);
    if (!is_first && before > now) now = before;
    Vec sums = Isa::zero();
    for (int key = 0; key < num_keys; key += Isa::kWidth) {
        const Vec weights = exp2<Isa>(Isa::sub(Isa::load(scores + key), Isa::set1(now)));
        Isa::store(scores + key, weights);
        sums = Isa::add(sums, weights);
    }
    const float sum = reduce<Isa, false>(sums);
    float decay[Isa::kWidth] = {0};
    if (!is_first) Isa::store(decay, exp2<Isa>(Isa::set1(before - now)));
    s.sum[head] = is_first ? sum : s.sum[head] * decay[0] + sum;
    s.maximum[head] = now;
    return decay[0];
}

// Adds a block's weighted values to kVectors vectors of kHeads outputs, from `column` on.
template <class Isa, int kHeads, int kVectors, typename T>
void add_values(const DecodeState& s, const DecodeRows<T>& rows, int num_keys, int head, int column,
                int head_dim) {
    using Wide = typename Isa::Wide;
    typename Isa::Vec acc[kHeads][kVectors];
    float* output = s.output + head * s.stride + column;
    const float* weights = s.scores + head * kBlockKeys;
    const int64_t offset = rows.offset + column;
    const auto each = [&](auto body) {
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                body(acc[h][v], output + h * s.stride + v * Isa::kWidth);
            }
        }
    };
    const bool is_first_sweep = head == 0 && column == 0;
    each([](auto& x, const float* state) { x = Isa::load(state); });
    const auto sweep = [&](auto count) {
        for (int key = 0; key < num_keys; ++key) {
            if (is_first_sweep) prefetch_row(rows.ahead[key] + rows.ahead_offset, head_dim);
            typename Isa::Vec lanes[kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                lanes[v] = Wide::load_words(rows.values[key] + offset + v * Isa::kWidth, count(v));
            }
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; ++h) {
                const typename Isa::Vec weight = Isa::set1(weights[h * kBlockKeys + key]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    acc[h][v] = Isa::fma(lanes[v], weight, acc[h][v]);
                }
            }
        }
    };
    if (column + kVectors * Isa::kWidth <= head_dim) {
        sweep([](int) { return Isa::kWidth; });
    } else {
        sweep([=](int v) { return head_dim - column - v * Isa::kWidth; });
    }
    each([](auto& x, float* state) { Isa::store(state, x); });
}

template <class Isa, int kHeads, int kVectors, typename T>
void add_columns(const DecodeState& s, const DecodeRows<T>& rows, int num_keys, int head,
                 int column, int num_vectors, int head_dim) {
    if (num_vectors == kVectors) {
        add_values<Isa, kHeads, kVectors>(s, rows, num_keys, head, column, head_dim);
    } else if constexpr (kVectors > 1) {
        add_columns<Isa, kHeads, kVectors - 1>(s, rows, num_keys, head, column, num_vectors,
                                               head_dim);
    }
}

// All columns of kHeads heads, in the fewest column groups of nearly equal width.
template <class Isa, int kHeads, typename T>
void add_heads(const DecodeState& s, const DecodeRows<T>& rows, int num_keys, int head,
               int head_dim) {
    constexpr int kMost = Isa::kMaxValueVectors * (kHeads == 4 ? 1 : 2);
    int rest = ceil_div(head_dim, Isa::kWidth);
    int column = 0;
    for (int groups = ceil_div(rest, kMost); groups > 0; --groups) {
        const int num_vectors = ceil_div(rest, groups);
        add_columns<Isa, kHeads, kMost>(s, rows, num_keys, head, column, num_vectors, head_dim);
        rest -= num_vectors;
        column += num_vectors * Isa::kWidth;
    }
}

template <class Isa, typename T>
void decode_block(const DecodeState& s, const DecodeRows<T>& rows, int num_keys, int num_heads,
                  const DecodeScores& how, int head_dim, bool is_first) {
    if (how.is_plain()) {
        score_decoded<Isa, true>(s, rows, num_keys, num_heads, how, head_dim);
    } else {
        score_decoded<Isa, false>(s, rows, num_keys, num_heads, how, head_dim);
    }
    for (int head = 0; head < num_heads; ++head) {
        const float decay = soften_decoded<Isa>(s, head, num_keys, is_first);
        if (decay == 1.0f) continue;  // the largest score so far still is
        float* output = s.output + head * s.stride;
        for (int i = 0; i < s.stride; i += Isa::kWidth) {
            const typename Isa::Vec kept = Isa::mul(Isa::load(output + i), Isa::set1(decay));
            Isa::store(output + i, is_first ? Isa::zero() : kept);
        }
    }
    int head = 0;
    for (; head + 4 <= num_heads; head += 4) {
        add_heads<Isa, 4>(s, rows, num_keys, head, head_dim);
    }
    for (; head + 2 <= num_heads; head += 2) {
        add_heads<Isa, 2>(s, rows, num_keys, head, head_dim);
    }
    if (head < num_heads) add_heads<Isa, 1>(s, rows, num_keys, head, head_dim);
}

// The rows of a block's keys; the last one again up to the block's end.
template <typename T>
void find_rows(const KeyRows<T>& rows, int first_key, int num_keys, const T** found) {
    for (int i = 0; i < num_keys; ++i) found[i] = rows(first_key + i);
    for (int i = num_keys; i < kBlockKeys; ++i) found[i] = found[num_keys - 1];
}

template <class Isa, typename T>
void finish_decoded(const float* output, float sum, int head_dim, T* out) {
    for (int i = 0; i < head_dim; i += Isa::kWidth) {
        Isa::store_row(out + i, Isa::div(Isa::load(output + i), Isa::set1(sum)), head_dim - i);
    }
}

template <typename T>
T* decoded_row(const AttentionInput& in, int sequence, int head) {
    return static_cast<T*>(in.out) + in.cu_seqlens[sequence] * in.out_stride +
           head * int64_t{in.head_dim};
}

template <class Isa, typename T>
void load_queries(const AttentionInput& in, int sequence, int first_head, int num_heads,
                  const DecodeState& s) {
    const T* q = static_cast<const T*>(in.q) + in.cu_seqlens[sequence] * in.q_stride +
                 first_head * int64_t{in.head_dim};
    for (int head = 0; head < num_heads; ++head, q += in.head_dim) {
        for (int word = 0; word * Isa::kPair < in.head_dim; word += Isa::kWidth) {
            const int element = word * Isa::kPair;
            Isa::store(s.queries + head * s.stride + word,
                       Isa::load_words(q + element, in.head_dim - element));
        }
    }
}

// The query heads of one of the item's heads over one block of keys.
template <class Isa, typename T>
void decode_group(const AttentionInput& in, const DecodeItem& item, int kv_head, int first_key,
                  int num_keys, const DecodeRows<T>& rows, const DecodeState& s) {
    const int group = in.num_heads / in.num_kv_heads;
    DecodeScores how{in.softmax_scale * kLog2E, in.softcap * kLog2E, nullptr,
                     first_key - (in.num_keys(item.sequence) - 1)};
    for (int first = 0; first < group; first += kDecodeHeads) {
        if (in.alibi_slopes != nullptr) {
            how.slopes = in.alibi_slopes + (item.first_kv_head + kv_head) * group + first;
        }
        decode_block<Isa>(s.from(kv_head * group + first), rows, num_keys,
                          min_int(kDecodeHeads, group - first), how, in.head_dim,
                          first_key == item.first_key);
    }
}

// All heads of the item over all its keys, whose rows hold all heads.
template <class Isa, typename T>
void decode_heads(const AttentionInput& in, const DecodeItem& item, const DecodeState& s) {
    const KeyRows<T> k = key_rows<T>(in, in.k, in.k_stride, item.sequence, item.first_kv_head);
    const KeyRows<T> v = key_rows<T>(in, in.v, in.v_stride, item.sequence, item.first_kv_head);
    const int end = item.first_key + item.num_keys;
    DecodeRows<T> rows;
    find_rows(k, item.first_key, min_int(kBlockKeys, item.num_keys), rows.next_keys);
    for (int first_key = item.first_key; first_key < end; first_key += kBlockKeys) {
        const int num_keys = min_int(kBlockKeys, end - first_key);
        const int num_next = min_int(kBlockKeys, end - first_key - num_keys);
        for (int i = 0; i < kBlockKeys; ++i) rows.keys[i] = rows.next_keys[i];
        find_rows(v, first_key, num_keys, rows.values);
        if (num_next > 0) find_rows(k, first_key + num_keys, num_next, rows.next_keys);
        for (int kv_head = 0; kv_head < item.num_kv_heads; ++kv_head) {
            const bool is_last = kv_head + 1 == item.num_kv_heads;
            rows.offset = kv_head * int64_t{in.head_dim};
            rows.ahead = is_last ? rows.next_keys : rows.keys;
            rows.ahead_offset = is_last ? 0 : rows.offset + in.head_dim;
            decode_group<Isa>(in, item, kv_head, first_key, num_keys, rows, s);
        }
    }
}

// As decode_heads, of codes: a block of one head is restored at a time, into `restored`, for all
// query heads.
template <class Isa, typename R>
void decode_codes(const AttentionInput& in, const DecodeItem& item, const DecodeState& s,
                  R* restored) {
    const int end = item.first_key + item.num_keys;
    R* values = restored + int64_t{kBlockKeys} * s.stride;
    DecodeRows<R> rows;
    rows.offset = rows.ahead_offset = 0;
    rows.ahead = rows.keys;
    for (int i = 0; i < kBlockKeys; ++i) {
        rows.keys[i] = restored + int64_t{i} * s.stride;
        rows.values[i] = values + int64_t{i} * s.stride;
    }
    for (int first_key = item.first_key; first_key < end; first_key += kBlockKeys) {
        const int num_keys = min_int(kBlockKeys, end - first_key);
        // Vectors of keys are whole: those behind the last one are its copies.
        for (int i = num_keys; i < kBlockKeys; ++i) rows.keys[i] = rows.keys[num_keys - 1];
        for (int kv_head = 0; kv_head < item.num_kv_heads; ++kv_head) {
            const int head = item.first_kv_head + kv_head;
            restore_rows<Isa>(code_rows(in, in.k, in.k_scales, in.k_stride, item.sequence, head),
                              first_key, num_keys, in.head_dim, restored, s.stride);
            restore_rows<Isa>(code_rows(in, in.v, in.v_scales, in.v_stride, item.sequence, head),
                              first_key, num_keys, in.head_dim, values, s.stride);
            decode_group<Isa>(in, item, kv_head, first_key, num_keys, rows, s);
        }
    }
}

template <class Isa, typename T>
void decode(const AttentionInput& in, const DecodeItem& item, float* scratch) {
    const DecodeState s(in.head_dim, scratch);
    const int group = in.num_heads / in.num_kv_heads;
    const int num_heads = item.num_kv_heads * group;
    const int first_head = item.first_kv_head * group;
    load_queries<Isa, T>(in, item.sequence, first_head, num_heads, s);
    if (in.k_scales == nullptr) {
        decode_heads<Isa, T>(in, item, s);
    } else {
        float* restored = scratch + AttentionScratch(in.head_dim).own_words();
        decode_codes<Isa>(in, item, s, reinterpret_cast<Restored<Isa, T>*>(restored));
    }
    const int64_t words = bytetx::cpu::decode_partial_words(in.head_dim);
    for (int head = 0; head < num_heads; ++head) {
        const float* output = s.output + head * s.stride;
        if (item.partials == nullptr) {
            finish_decoded<Isa>(output, s.sum[head], in.head_dim,
                                decoded_row<T>(in, item.sequence, first_head + head));
            continue;
        }
        float* partial = item.partials + (first_head + head) * words;
        partial[0] = s.maximum[head];
        partial[1] = s.sum[head];
        for (int i = 0; i < s.stride; ++i) partial[16 + i] = output[i];
    }
}

template <class Isa, typename T>
void merge_decoded(const AttentionInput& in, int32_t sequence, int32_t first_head,
                   int32_t num_heads, const float* partials, int32_t num_runs, float* scratch) {
    const DecodeState s(in.head_dim, scratch);
    const int64_t words = bytetx::cpu::decode_partial_words(in.head_dim);
    const int64_t run_words = in.num_heads * words;
    for (int head = first_head; head < first_head + num_heads; ++head) {
        const float* first = partials + head * words;
        float maximum = first[0];
        for (int run = 1; run < num_runs; ++run) {
            const float other = first[run * run_words];
            maximum = other > maximum ? other : maximum;
        }
        float sum = 0;
        for (int i = 0; i < s.stride; ++i) s.output[i] = 0;
        for (int run = 0; run < num_runs; ++run) {
            const float* partial = first + run * run_words;
            float decay[Isa::kWidth];
            Isa::store(decay, exp2<Isa>(Isa::set1(partial[0] - maximum)));
            sum += decay[0] * partial[1];
            for (int i = 0; i < s.stride; ++i) s.output[i] += decay[0] * partial[16 + i];
        }
        finish_decoded<Isa>(s.output, sum, in.head_dim, decoded_row<T>(in, sequence, head));
    }
}

}  // namespace
