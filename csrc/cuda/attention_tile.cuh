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
        float factor[2];
        if (weigh<kN>(scores, first, factor, find)) Rows::rescale(factor);
        uint32_t weights[kN / 4];
        Rows::template pack_weights<kN>(weights, scores);
        wait_v();
        Rows::template multiply_pv<kN>(weights, v);
        wait_for_products<0>();
        out.pin();
    }

    template <int kN, typename Scores, typename Find>
    __device__ __forceinline__ bool weigh(Scores& scores, int first, float (&factor)[2],
                                          Find&& find) {
        // From a score to a power of two; a constant costs no register.
        const float scale = C::kChangesScores ? 1.0f : p.power_scale;
        return Rows::template weigh<kN>(scores, first, scale, factor, find);
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
