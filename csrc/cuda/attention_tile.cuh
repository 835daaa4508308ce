// Shared by the kernels of packed attention: 64 rows of one head, which keys they see, and a step
// of keys by attention_rows.cuh.
//
// A tile is 64 consecutive token rows of one head and takes no notice of where sequences begin. Its
// keys are one run of rows, from the first key of its first row to the last key of its last row;
// bounds grow with the row, so [begin, end) of a row, warp or warpgroup comes from its end rows.
//
//   rows of the tile   keys  0 1 2 3 4 5 6 7
//   sequence A  0            x x x . . . . .      x  score of the row's own sequence
//               1            x x x . . . . .      .  computed by the matrix unit, then masked
//               2            x x x . . . . .
//   sequence B  3            . . . x x x x x
#pragma once

#include <type_traits>

#include "cuda/attention_rows.cuh"
#include "cuda/attention_types.cuh"

namespace bytetx::attention {

// The keys that `row` sees, of its sequence [bounds.x, bounds.y).
__device__ __forceinline__ int2 key_bounds(const Params& p, int2 bounds, int row) {
    if (p.causal) {
        bounds.y = min(bounds.y, row + 1);
    } else if (p.window > 0) {
        bounds.y = min(bounds.y, row + p.window);
    }
    if (p.window > 0) bounds.x = max(bounds.x, min(bounds.y, row + 1 - p.window));
    return bounds;
}

// The keys of a tile in a tree of sequences, in parts: those of each ancestor, the first one first,
// and then its own. Steps of kN keys go through them one part after the other; a key's place is its
// number in these steps, so that the next part begins at a multiple of kN. In shared memory.
template <int kN>
struct KeyParts {
    static constexpr int kOwn = kMaxAncestors;  // the part behind the ancestors
    int place[kOwn + 2];                        // where each part begins, and the end of all
    int row[kOwn + 1];                          // its first key
    int end[kOwn + 1];                          // one past the place of its last key
    int lowest[kOwn];  // place of the first key that the first row of a sequence sees

    // Places of all ancestors.
    static __device__ __forceinline__ int num_places(const int2* ancestors, int window) {
        int after = 0, next = 0;
#pragma unroll 1
        for (int i = kOwn - 1; i >= 0; --i) {
            const int length = ancestors[i].y - ancestors[i].x;
            after += length;
            const int hidden = window > 0 ? min(max(after + 1 - window, 0), length) : 0;
            next += (length - hidden + kN - 1) / kN * kN;
        }
        return next;
    }

    // own: the keys of the tile's sequences. Ancestors' keys that no row sees are left out.
    __device__ __forceinline__ void fill(const int2* ancestors, int2 own, int window) {
        int after = 0, next = 0;  // tokens of the ancestors still to come
#pragma unroll
        for (int i = 0; i < kOwn; ++i) after += ancestors[i].y - ancestors[i].x;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int2 keys = ancestors[i];
            const int hidden = window > 0 ? after + 1 - window : 0;
            const int first = min(keys.x + max(hidden, 0), keys.y);
            place[i] = next;
            row[i] = first;
            end[i] = next + keys.y - first;
            lowest[i] = next + keys.x + hidden - first;
            next += (keys.y - first + kN - 1) / kN * kN;
            after -= keys.y - keys.x;
        }
        place[kOwn] = next;
        row[kOwn] = own.x;
        end[kOwn] = place[kOwn + 1] = next + own.y - own.x;
    }

    // The part that the step at a place is in.
    __device__ __forceinline__ int part_at(int at) const {
        int part = 0;
#pragma unroll
        for (int i = 1; i <= kOwn; ++i) part += at >= place[i];
        return part;
    }
    __device__ __forceinline__ int row_at(int at) const {
        const int part = part_at(at);
        return row[part] + at - place[part];
    }
    // How far a row of the own part is behind its place.
    __device__ __forceinline__ int shift(int part) const { return row[part] - place[part]; }

    // The places that `row` of the sequence [sequence.x, sequence.y) sees in a part.
    __device__ __forceinline__ int2 bounds(const Params& p, int part, int2 sequence, int at) const {
        if (part == kOwn) {
            const int2 rows = key_bounds(p, sequence, at);
            return {rows.x - shift(kOwn), rows.y - shift(kOwn)};
        }
        int first = place[part];
        if (p.window > 0) first = max(first, lowest[part] + at - sequence.x);
        return {min(first, end[part]), end[part]};
    }
};

// Takes no room where there is no tree.
struct NoParts {};

template <typename C>
using KeyPartsOf = std::conditional_t<C::kHasTree, KeyParts<C::kBlockN>, NoParts>;

// Position of a token for the relative bias; any token: neighbours of the batch are clamped.
__device__ __forceinline__ int bias_position(const Params& p, int token) {
    return p.bias_positions ? p.bias_positions[min(max(token, 0), p.total_tokens - 1)] : token;
}

// One warpgroup's 64 rows of one head.
template <typename C>
struct RowTile : SoftmaxRows<C> {
    using T = typename C::Element;
    using Rows = SoftmaxRows<C>;
    using Rows::lane, Rows::out, Rows::tid;
    const Params& p;
    int base;      // first row
    int num_rows;  // from there on: rows after them see nothing of their own
    int head;

    __device__ __forceinline__ explicit RowTile(const Params& params) : p(params) {
        tid = static_cast<int>(threadIdx.x) % 128;
        lane = static_cast<int>(threadIdx.x) % 32;
    }

    __device__ __forceinline__ int row(int half) const { return base + Rows::row(half); }

    // sequences: row_bounds of the warpgroup's 64 rows, in global or shared memory. keys: the
    // tile's; rows of other tiles see none, from the last one on.
    __device__ __forceinline__ void start(const int2* sequences, int2 keys) {
        find_seen(sequences, keys);
        Rows::clear();
    }

    // As above, in one part of a tree's keys; at: the place of its first step.
    __device__ __forceinline__ void find_seen(const int2* sequences,
                                              const KeyParts<C::kBlockN>& keys, int part, int at) {
        const bool is_used = tid / 32 * 16 < num_rows;
        int2 bounds[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = min(Rows::row(half), num_rows - 1);
            bounds[half] = is_used ? keys.bounds(p, part, sequences[local], base + local)
                                   : make_int2(keys.end[part], keys.end[part]);
        }
        Rows::see_part(bounds, at);
    }

    __device__ __forceinline__ void find_seen(const int2* sequences, int2 keys) {
        // Rows past the end see what the last one sees, for a warp whose rows all see a step masks
        // nothing; they are not stored. Warps without any row see no key.
        const bool is_used = tid / 32 * 16 < num_rows;
        int2 bounds[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = min(Rows::row(half), num_rows - 1);
            bounds[half] =
                is_used ? key_bounds(p, sequences[local], base + local) : make_int2(keys.y, keys.y);
        }
        Rows::see(bounds, keys.x);
    }

    // out += softmax weights of keys first .. first + kN - 1, times their values. find is called
    // where seen is needed, wait_v when the values are; k and v are free on return.
    template <int kN, typename Find, typename WaitV>
    __device__ __forceinline__ void attend(const T* q, const T* k, const T* v, int first,
                                           Find&& find, WaitV&& wait_v) {
        auto scores = Rows::template multiply_qk<kN>(q, k);
        wait_for_products<0>();
        scores.pin();
        if constexpr (C::kChangesScores) change<kN>(scores, first);
        // From a score to a power of two; a constant costs no register.
        const float scale = C::kChangesScores ? 1.0f : p.power_scale;
        Rows::template add_values<kN>(scores, v, first, scale, find, wait_v);
    }

    // Scores become scaled and capped scores plus bias, in powers of two.
    template <int kN, typename Scores>
    __device__ __forceinline__ void change(Scores& scores, int first) {
        if (p.softcap > 0.0f) {
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) scores(i) = p.capped(scores(i));
        } else {
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) scores(i) *= p.power_scale;
        }
        if (p.relative_bias != nullptr) add_bias<kN>(scores, first);
    }

    // Keys outside the row's sequence have no distance: their index is clamped and their score is
    // masked right after.
    template <int kN, typename Scores>
    __device__ __forceinline__ void add_bias(Scores& scores, int first) {
        const float* table = p.relative_bias + int64_t{head} * (2 * p.bias_span - 1);
        const int zero[2] = {p.bias_span - 1 - bias_position(p, row(0)),
                             p.bias_span - 1 - bias_position(p, row(1))};
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            const int key = first + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            const int distance = bias_position(p, key) + zero[(i / 2) % 2];
            const int index = min(max(distance, 0), 2 * p.bias_span - 2);
            scores(i) = fmaf(table[index], kLog2e, scores(i));
        }
    }
};

}  // namespace bytetx::attention
