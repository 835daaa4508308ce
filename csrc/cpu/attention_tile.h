// The four steps of attention_kernel.h on one tile: packing, scores, softmax, values.  Layouts and
// bounds are described there.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/attention_rows.h"

namespace {

using bytetx::cpu::AttentionScratch;
using bytetx::cpu::kGroupQueries;

constexpr int kPackingTiles = 4;  // fewer tiles than 5 read k and v in place

// Longest chain of f32 additions in one score.  The error of a chain grows with its length; one of
// 256 had twice the error of torch's product.
constexpr int kChainWords = 128;
constexpr float kLog2E = 1.4426950408889634f;

// Term added to the score of a hidden key: far below every score, and not infinite, so that no
// difference of two is NaN.  The running maximum starts above it.
constexpr float kHidden = -1e30f;

// A score that belongs to no key: its weight counts in the sum alone.
struct Sink {
    bool is_there;
    float value;
    float score;  // the value in the units of the scores
};

inline int min_int(int a, int b) { return a < b ? a : b; }
inline float max_float(float a, float b) { return a < b ? b : a; }
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The y of 2^r = 1 + r y for |r| <= 1/2, a polynomial.  Largest relative error of 2^r, evaluated in
// f32: degree 6 7.9e-8 (0.94 ulp), degree 4 2.9e-6.  Coefficients minimise it with the constant
// term of 2^r fixed to 1, so that 2^0 is exactly 1.
template <class Isa>
inline typename Isa::Vec exp2_slope(typename Isa::Vec r) {
    using Vec = typename Isa::Vec;
    Vec y;
    if constexpr (Isa::kExp2Degree == 6) {
        y = Isa::fma(Isa::set1(1.5357772645e-4f), r, Isa::set1(1.3398959999e-3f));
        y = Isa::fma(y, r, Isa::set1(9.6184201538e-3f));
        y = Isa::fma(y, r, Isa::set1(5.5503323674e-2f));
        y = Isa::fma(y, r, Isa::set1(2.4022647738e-1f));
        y = Isa::fma(y, r, Isa::set1(6.9314718246e-1f));
    } else {
        static_assert(Isa::kExp2Degree == 4);
        y = Isa::fma(Isa::set1(9.5828538761e-3f), r, Isa::set1(5.5906426162e-2f));
        y = Isa::fma(y, r, Isa::set1(2.4024099112e-1f));
        y = Isa::fma(y, r, Isa::set1(6.9312417507e-1f));
    }
    return y;
}

// 2^x for x <= 0: x = n + r with |r| <= 1/2, 2^r times 2^n.
template <class Isa>
inline typename Isa::Vec exp2(typename Isa::Vec x) {
    using Vec = typename Isa::Vec;
    if constexpr (Isa::kMinExponent < 0) x = Isa::max(Isa::set1(Isa::kMinExponent), x);
    const Vec n = Isa::round(x);
    const Vec r = Isa::sub(x, n);
    return Isa::scale_by_power(Isa::fma(exp2_slope<Isa>(r), r, Isa::set1(1.0f)), n);
}

// tanh(x) = e / (e + 2) with e = e^2x - 1 = 2^n (2^r - 1) + (2^n - 1), which keeps the digits of
// small x: at most 2 ulp where degree 6 is in use, and nowhere above 1.
template <class Isa>
inline typename Isa::Vec tanh(typename Isa::Vec x) {
    using Vec = typename Isa::Vec;
    const Vec zero = Isa::zero(), lowest = Isa::set1(-9.5f);  // where tanh rounds to -1
    x = Isa::max(lowest, x);
    x = Isa::sub(zero, Isa::max(lowest, Isa::sub(zero, x)));
    x = Isa::mul(x, Isa::set1(2 * kLog2E));
    const Vec n = Isa::round(x);
    const Vec r = Isa::sub(x, n);
    const Vec power = Isa::scale_by_power(Isa::set1(1.0f), n);
    const Vec e = Isa::fma(Isa::mul(exp2_slope<Isa>(r), r), power, Isa::sub(power, Isa::set1(1)));
    return Isa::div(e, Isa::add(e, Isa::set1(2.0f)));
}

// Lane i: -i.
template <class Isa>
typename Isa::Vec minus_lanes() {
    static constexpr auto lanes = [] {
        struct {
            float x[Isa::kWidth];
        } table{};
        for (int i = 0; i < Isa::kWidth; ++i) table.x[i] = static_cast<float>(-i);
        return table;
    }();
    return Isa::load(lanes.x);
}

// A word where it lies in k or v: any type, aligned to its elements only.
typedef float Word __attribute__((may_alias, aligned(2)));

// The keys or values of a block: packed, or in place.
struct Operand {
    const Word* words;
    int64_t stride;  // words from row to row
};

// Strides and buffers of one group; pointers into the thread's scratch.
template <class Isa>
struct Workspace {
    static constexpr int kTile = Isa::kScoreVectors * Isa::kWidth;  // queries

    int head_dim;
    int score_steps;   // words of d in a query or key
    int key_stride;    // words, packed
    int value_stride;  // words, packed; also of `output`
    float* scores;
    float* keys;
    float* values;
    float* queries;
    float* output;   // [query][value_stride], unnormalised
    float* maximum;  // by query: largest score so far, in units of the scores
    float* sum;
    float* decay;  // by query: what the last block's maximum did to the ones before

    Workspace(int head_dim_, float* scratch)
        : head_dim(head_dim_),
          score_steps(ceil_div(head_dim_, Isa::kPair)),
          key_stride(ceil_div(score_steps, Isa::kWidth) * Isa::kWidth),
          value_stride(ceil_div(head_dim_, Isa::kWidth) * Isa::kWidth) {
        const AttentionScratch sizes(head_dim_);
        scores = scratch;
        keys = scores + sizes.scores_words();
        values = keys + sizes.keys_words();
        queries = values + sizes.keys_words();
        output = queries + sizes.queries_words();
        maximum = output + sizes.queries_words();
        sum = maximum + kGroupQueries;
        decay = sum + kGroupQueries;
    }
    float* query_tile(int first_query) const {
        return queries + static_cast<int64_t>(first_query) * score_steps;
    }
};

// One vector of queries, transposed to [word of d][lane]; rows that are not there become zeros.
template <class Isa, typename T>
void pack_queries(const Workspace<Isa>& w, const T* q, int64_t stride, int num_rows,
                  float* packed) {
    constexpr int kWidth = Isa::kWidth;
    for (int word = 0; word < w.score_steps; word += kWidth) {
        const int element = word * Isa::kPair;
        typename Isa::Vec rows[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
            rows[i] = i < num_rows ? Isa::load_words(q + i * stride + element, w.head_dim - element)
                                   : Isa::zero();
        }
        Isa::transpose(rows);
        const int num_words = min_int(kWidth, w.score_steps - word);
        for (int i = 0; i < num_words; ++i) {
            Isa::store(packed + (word + i) * w.kTile, rows[i]);
        }
    }
}

// Rows of T whose memory is already rows of words need no packing where few tiles read them: the
// copy would cost more than the cache misses and page walks of the long stride.
template <class Isa, typename T>
bool can_stay(const KeyRows<T>& rows, int head_dim, int num_tiles) {
    return sizeof(T) * Isa::kPair == sizeof(Word) && rows.stride % Isa::kPair == 0 &&
           rows.pages == nullptr && head_dim % Isa::kPair == 0 && num_tiles <= kPackingTiles;
}

template <class Isa, typename T>
Operand pack_keys(const Workspace<Isa>& w, const KeyRows<T>& k, int first_key, int num_keys,
                  int num_tiles) {
    if (can_stay<Isa>(k, w.head_dim, num_tiles)) {
        return {reinterpret_cast<const Word*>(k(first_key)), k.stride / Isa::kPair};
    }
    for (int key = 0; key < num_keys; ++key) {
        const T* row = k(first_key + key);
        for (int word = 0; word < w.score_steps; word += Isa::kWidth) {
            const int element = word * Isa::kPair;
            Isa::store(w.keys + key * w.key_stride + word,
                       Isa::load_words(row + element, w.head_dim - element));
        }
    }
    return {w.keys, w.key_stride};
}

// Pairs of keys are never in place, and neither are rows that a whole vector would read past.
template <class Isa, typename T>
Operand pack_values(const Workspace<Isa>& w, const KeyRows<T>& v, int first_key, int num_keys,
                    int num_tiles) {
    if (Isa::kPair == 1 && w.head_dim == w.value_stride &&
        can_stay<Isa>(v, w.head_dim, num_tiles)) {
        return {reinterpret_cast<const Word*>(v(first_key)), v.stride};
    }
    float* packed = w.values;
    for (int key = 0; key < num_keys; key += Isa::kPair, packed += w.value_stride) {
        const T* even = v(first_key + key);
        const T* odd = nullptr;
        if (Isa::kPair == 2 && key + 1 < num_keys) odd = v(first_key + key + 1);
        for (int i = 0; i < w.head_dim; i += Isa::kWidth) {
            Isa::store(packed + i,
                       Isa::load_word_rows(even + i, odd ? odd + i : nullptr, w.head_dim - i));
        }
    }
    return {w.values, w.value_stride};
}

// The register tile of both products: sums[i][v] = sum over steps of words[offset(i)] times vector
// v of the row, where each step moves the words on by word_stride and the row by row_stride.
template <class Isa, int kOnes, int kVectors, typename R, typename W, typename Offset>
inline void multiply(typename Isa::Vec (&sums)[kOnes][kVectors], int num_steps, const R* row,
                     int64_t row_stride, const W* words, int64_t word_stride, Offset offset) {
#pragma GCC unroll 16
    for (int i = 0; i < kOnes; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[i][v] = Isa::zero();
    }
#pragma GCC unroll 1
    for (int step = 0; step < num_steps; ++step, row += row_stride, words += word_stride) {
        typename Isa::Vec lanes[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) lanes[v] = Isa::load_in_place(row + v * Isa::kWidth);
#pragma GCC unroll 16
        for (int i = 0; i < kOnes; ++i) {
            const typename Isa::Vec one = Isa::set1(words[offset(i)]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[i][v] = Isa::dot(sums[i][v], lanes[v], one);
        }
    }
}

// s[key][lane] = k[key] . q[lane] over num_words words of d, added to what is there unless these
// are the first words; `maximum` follows at the last ones.
template <class Isa, int kVectors, int kKeys>
inline void score_words(const Workspace<Isa>& w, const float* q, const Word* k, int64_t k_stride,
                        int num_words, bool is_first, bool is_last, float* s,
                        typename Isa::Vec (&maximum)[kVectors]) {
    using Vec = typename Isa::Vec;
    Vec acc[kKeys][kVectors];
    multiply<Isa>(acc, num_words, q, w.kTile, k, 1, [=](int key) { return key * k_stride; });
    const auto each = [&](auto body) {
#pragma GCC unroll 16
        for (int key = 0; key < kKeys; ++key) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                body(acc[key][v], maximum[v], s + key * w.kTile + v * Isa::kWidth);
            }
        }
    };
    if (!is_first) each([](Vec& x, Vec&, float* p) { x = Isa::add(x, Isa::load(p)); });
    if (is_last) each([](Vec& x, Vec& m, float*) { m = Isa::max(m, x); });
    each([](Vec& x, Vec&, float* p) { Isa::store(p, x); });
}

template <class Isa, int kVectors, int kKeys>
inline void score_keys(const Workspace<Isa>& w, const float* q, const Operand& k, float* s,
                       typename Isa::Vec (&maximum)[kVectors]) {
    for (int word = 0; word < w.score_steps; word += kChainWords) {
        const int rest = w.score_steps - word;
        score_words<Isa, kVectors, kKeys>(w, q + word * w.kTile, k.words + word, k.stride,
                                          min_int(kChainWords, rest), word == 0,
                                          rest <= kChainWords, s, maximum);
    }
}

// The last num_keys < kScoreKeys keys of a block.
template <class Isa, int kVectors, int kKeys>
inline void score_rest(const Workspace<Isa>& w, int num_keys, const float* q, const Operand& k,
                       float* s, typename Isa::Vec (&maximum)[kVectors]) {
    if (num_keys == kKeys) return score_keys<Isa, kVectors, kKeys>(w, q, k, s, maximum);
    if constexpr (kKeys > 1) score_rest<Isa, kVectors, kKeys - 1>(w, num_keys, q, k, s, maximum);
}

template <class Isa, int kVectors>
void score_block(const Workspace<Isa>& w, const float* q, Operand k, int num_keys,
                 typename Isa::Vec (&maximum)[kVectors]) {
    constexpr int kKeys = Isa::kScoreKeys;
    float* s = w.scores;
    int key = 0;
    for (; key + kKeys <= num_keys; key += kKeys, s += kKeys * w.kTile) {
        score_keys<Isa, kVectors, kKeys>(w, q, k, s, maximum);
        k.words += kKeys * k.stride;
    }
    score_rest<Isa, kVectors, kKeys - 1>(w, num_keys - key, q, k, s, maximum);
}

// Takes a block's maximum into the running one: returns what every score * unit of a vector is
// shifted by, and leaves in `decay` the factor for all that was summed before.  first: the running
// one before the first block.
template <class Isa>
inline typename Isa::Vec raise_maximum(const Workspace<Isa>& w, int query, bool is_first,
                                       typename Isa::Vec first, typename Isa::Vec units,
                                       typename Isa::Vec maximum) {
    const typename Isa::Vec before = is_first ? first : Isa::load(w.maximum + query);
    const typename Isa::Vec now = Isa::max(before, maximum);
    Isa::store(w.maximum + query, now);
    Isa::store(w.decay + query, exp2<Isa>(Isa::mul(units, Isa::sub(before, now))));
    return Isa::mul(units, now);
}

// Scores to weights p = 2^(unit * (s - maximum)), in place; running maximum, sum and decay follow.
// The maximum is exact and unit >= 0, so that every exponent is <= 0 up to one rounding.  A sink
// comes before the first block, as one key without a value would.
template <class Isa, int kVectors>
void softmax_block(const Workspace<Isa>& w, int tile, int num_keys, float unit, bool is_first,
                   const Sink& sink, const typename Isa::Vec (&maximum)[kVectors]) {
    using Vec = typename Isa::Vec;
    Vec shift[kVectors];
    Vec sums[2][kVectors];  // this block's even and odd keys: short chains keep the error low
    const Vec units = Isa::set1(unit);
    for (int v = 0; v < kVectors; ++v) {
        const Vec first = sink.is_there ? Isa::set1(sink.score) : maximum[v];
        shift[v] =
            raise_maximum<Isa>(w, tile + v * Isa::kWidth, is_first, first, units, maximum[v]);
        sums[0][v] = sums[1][v] = Isa::zero();
    }
    const auto weights = [&](int key, int v) {
        const float* s = w.scores + key * w.kTile + v * Isa::kWidth;
        return exp2<Isa>(Isa::fms(Isa::load(s), units, shift[v]));
    };
    float* p = w.scores;
    for (int key = 0; key + 1 < num_keys; key += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const Vec even = weights(key, v);
            const Vec odd = weights(key + 1, v);
            sums[0][v] = Isa::add(sums[0][v], even);
            sums[1][v] = Isa::add(sums[1][v], odd);
            Isa::store_weights(p + v * Isa::kWidth, w.kTile, even, odd);
        }
        p += 2 / Isa::kPair * w.kTile;
    }
    if (num_keys % 2 == 1) {
        for (int v = 0; v < kVectors; ++v) {
            const Vec even = weights(num_keys - 1, v);
            sums[0][v] = Isa::add(sums[0][v], even);
            Isa::store_weights(p + v * Isa::kWidth, w.kTile, even, Isa::zero());
        }
    }
    for (int v = 0; v < kVectors; ++v) {
        float* total = w.sum + tile + v * Isa::kWidth;
        const Vec sum = Isa::add(sums[0][v], sums[1][v]);
        if (is_first && sink.is_there) {
            const Vec value = Isa::set1(sink.value), to_log2 = Isa::set1(kLog2E);
            Isa::store(total, Isa::add(sum, exp2<Isa>(Isa::fms(value, to_log2, shift[v]))));
        } else {
            const Vec decay = Isa::load(w.decay + tile + v * Isa::kWidth);
            Isa::store(total, is_first ? sum : Isa::fma(Isa::load(total), decay, sum));
        }
    }
}

// Result of value_rows(), and what it does around its product.
template <typename T>
struct ValueTarget {
    T* out;  // row 0 of the tile in the result
    int64_t stride;
    int num_rows;
    bool is_first_block;
    bool is_last_block;
};

// output[row] = decay * output[row] + sum over keys p[key][row] v[key], for kRows rows from `row`
// of the tile at query `tile` on, and kVectors vectors of d from `column` on.  The last block
// divides by the sum and writes the result.
template <class Isa, int kVectors, typename T>
void value_rows(const Workspace<Isa>& w, const Operand& values, int num_steps, int tile, int row,
                int column, const ValueTarget<T>& target) {
    using Vec = typename Isa::Vec;
    constexpr int kRows = Isa::value_rows(kVectors);
    Vec acc[kRows][kVectors];
    multiply<Isa>(acc, num_steps, values.words + column, values.stride, w.scores + row, w.kTile,
                  [](int r) { return r; });
    const auto each = [&](auto body) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const int query = tile + row + r;
            float* state = w.output + query * static_cast<int64_t>(w.value_stride) + column;
            if (row + r >= target.num_rows) return;
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) body(acc[r][v], r, v, state + v * Isa::kWidth);
        }
    };
    const auto broadcast = [&](const float* by_query, int r) {
        return Isa::set1(by_query[tile + row + r]);
    };
    if (!target.is_first_block) {
        each([&](Vec& x, int r, int, const float* state) {
            x = Isa::fma(Isa::load(state), broadcast(w.decay, r), x);
        });
    }
    if (!target.is_last_block) {
        return each([](Vec& x, int, int, float* state) { Isa::store(state, x); });
    }
    each([&](Vec& x, int r, int v, const float*) {
        const int d = column + v * Isa::kWidth;
        Isa::store_row(target.out + (row + r) * target.stride + d, Isa::div(x, broadcast(w.sum, r)),
                       w.head_dim - d);
    });
}

template <class Isa, int kVectors, typename T>
void value_columns(const Workspace<Isa>& w, const Operand& values, int num_vectors, int num_steps,
                   int tile, int column, const ValueTarget<T>& target) {
    if (num_vectors == kVectors) {
        for (int row = 0; row < target.num_rows; row += Isa::value_rows(kVectors)) {
            value_rows<Isa, kVectors>(w, values, num_steps, tile, row, column, target);
        }
    } else if constexpr (kVectors > 1) {
        value_columns<Isa, kVectors - 1>(w, values, num_vectors, num_steps, tile, column, target);
    }
}

// All columns of a tile, in the fewest column groups of nearly equal width.
template <class Isa, typename T>
void value_block(const Workspace<Isa>& w, const Operand& values, int num_keys, int tile,
                 const ValueTarget<T>& target) {
    const int num_steps = ceil_div(num_keys, Isa::kPair);
    int rest = w.value_stride / Isa::kWidth;
    int column = 0;
    for (int groups = ceil_div(rest, Isa::kMaxValueVectors); groups > 0; --groups) {
        const int num_vectors = ceil_div(rest, groups);
        value_columns<Isa, Isa::kMaxValueVectors>(w, values, num_vectors, num_steps, tile, column,
                                                  target);
        rest -= num_vectors;
        column += num_vectors * Isa::kWidth;
    }
}

}  // namespace
