// Work of one warpgroup of packed attention on 64 rows and a step of keys: scores, masked
// softmax, the weighted sum of values. Rows are in an order in which the bounds of their keys,
// [begin, end), grow; so those of a warp come from its end rows.
#pragma once

#include "cuda/attention_mma.cuh"
#include "cuda/softmax_state.cuh"

namespace bytetx::attention {

// A row's maximum stays that of its first keys until a thread's weights of one row and step sum to
// more than this, which is far from f16's end: most rescales disappear.
constexpr float kMaxSum = 4096.0f;

// How many of a thread's columns (8 * j + {0, 1}, all j) are before `column`.
__device__ __forceinline__ int columns_before(int column) {
    return 2 * (max(column, 0) / 8) + min(max(column, 0) % 8, 2);
}

// Bit t is set where thread column t is in [begin, end), of 32 and counted from 0.
__device__ __forceinline__ unsigned column_bits(int begin, int end) {
    const auto from = [](int count) {
        unsigned bits;  // PTX shifts clamp: 32 and more give 0
        asm("shl.b32 %0, %1, %2;" : "=r"(bits) : "r"(~0u), "r"(max(count, 0)));
        return bits;
    };
    return from(begin) & ~from(end);
}

// One warpgroup's 64 rows of one head.
template <typename C>
struct SoftmaxRows {
    using T = typename C::Element;
    int tid;  // in the warpgroup
    int lane;
    int origin;                // first key of the tile
    int2 seen[2];              // bounds for its two rows, in the thread's columns from there on
    int full_begin, full_end;  // keys that every row of the warp sees
    SoftmaxState state[2];     // its two rows', with sums of this thread's weights alone
    Sums<C::kDim / 2> out;

    // The thread's two rows, of the 64.
    __device__ __forceinline__ int row(int half) const {
        return (tid / 32) * 16 + lane / 4 + 8 * half;
    }

    __device__ __forceinline__ void clear() {
        state[0].clear();
        state[1].clear();
        out.clear();
    }

    // The keys of the thread's two rows; first: of the tile.
    __device__ __forceinline__ void see(const int2 (&bounds)[2], int first) {
        origin = first;
        const int column = origin + 2 * (lane % 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            seen[half] = {columns_before(bounds[half].x - column),
                          columns_before(bounds[half].y - column)};
        }
        full_end = __shfl_sync(kFullMask, bounds[0].y, 0);
        full_begin = __shfl_sync(kFullMask, bounds[1].x, 31);
    }

    // As `see`, where bounds need not grow by rows: sequences of one tile see ancestors' keys from
    // different ones on.
    __device__ __forceinline__ void see_part(const int2 (&bounds)[2], int first) {
        see(bounds, first);
        full_begin = __reduce_max_sync(kFullMask, max(bounds[0].x, bounds[1].x));
    }

    // q: a tile in shared memory.
    template <int kN>
    __device__ __forceinline__ auto multiply_qk(const T* q, const T* k) {
        const Operand a = known_uniform(operand_at<C::kRowBytes>(q, C::kEightRows));
        return multiply_keys<kN>(k, [&](float* d, int step, Operand b) {
            multiply_add<T, kN>(d, a + C::feature_offset(step, C::kQBoxStep), b, step > 0);
        });
    }

    // q: what load_q left in registers.
    template <int kN>
    __device__ __forceinline__ auto multiply_qk(const uint32_t (&q)[C::kDim / 4], const T* k) {
        return multiply_keys<kN>(k, [&](float* d, int step, Operand b) {
            multiply_add<T, kN, false>(d, q + 4 * step, b, step > 0);
        });
    }

    // multiply(d, step, b): by 16 features of the keys.
    template <int kN, typename Multiply>
    __device__ __forceinline__ auto multiply_keys(const T* k, const Multiply& multiply) {
        const Operand b = known_uniform(operand_at<C::kRowBytes>(k, C::kKeyStep));
        Sums<kN / 2> scores = {};
        scores.pin();
        begin_products();
#pragma unroll
        for (int step = 0; step < C::kDim / 16; ++step) {
            multiply(scores.x, step, b + C::feature_offset(step, C::kBoxStep));
        }
        commit_products();
        return scores;
    }

    // Queries as the A operand of wgmma: four 8 x 8 matrices for each 16 features.
    __device__ __forceinline__ void load_q(uint32_t (&q)[C::kDim / 4], const T* tile) const {
        const uint32_t start = smem_address(tile);
#pragma unroll
        for (int i = 0; i < C::kDim / 4; i += 4) {
            const int row = tid / 32 * 16 + lane % 16, column = 4 * i + lane / 16 * 8;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(q[i]), "=r"(q[i + 1]), "=r"(q[i + 2]), "=r"(q[i + 3])
                         : "r"(start + tile_offset<C>(row, column)));
        }
    }

    // out += softmax weights of the scores of keys first .. first + kN - 1, times their values.
    // find, scale: see weigh(). wait_v is called when the values are needed; v is free on return.
    template <int kN, typename Scores, typename Find, typename WaitV>
    __device__ __forceinline__ void add_values(Scores& scores, const T* v, int first, float scale,
                                               Find&& find, WaitV&& wait_v) {
        float factor[2];
        if (weigh<kN>(scores, first, scale, factor, find)) rescale(factor);
        uint32_t weights[kN / 4];
        pack_weights<kN>(weights, scores);
        wait_v();
        multiply_pv<kN>(weights, v);
        wait_for_products<0>();
        out.pin();
    }

    template <int kN>
    __device__ __forceinline__ void multiply_pv(const uint32_t* weights, const T* v) {
        const Operand b = known_uniform(
            operand_at<C::kRowBytes>(v, C::kKeyStep, C::kBoxes > 1 ? C::kBoxStep : 0));
        out.pin();
        begin_products();
#pragma unroll
        for (int step = 0; step < kN / 16; ++step) {
            multiply_add<T, C::kDim, true>(out.x, weights + 4 * step, b + step * 2 * C::kKeyStep,
                                           1);
        }
        commit_products();
    }

    // Whether every row of the warp sees every one of the keys first .. first + kN - 1.
    template <int kN>
    __device__ __forceinline__ bool sees_all(int first) const {
        return first >= full_begin && first + kN <= full_end;
    }

    // Scores become weights 2^(score * scale - max), and sums follow. True where max was raised:
    // out must be multiplied by factor, which is set only then. find fills seen in where it is
    // needed.
    template <int kN, typename Scores, typename Find>
    __device__ __forceinline__ bool weigh(Scores& scores, int first, float scale,
                                          float (&factor)[2], Find&& find) {
        if (sees_all<kN>(first)) {
            return softmax<kN>(scores, first, scale, factor, [](int) { return true; });
        }
        find();
        const int passed = (first - origin) / 4;  // thread columns
        const unsigned bits[2] = {column_bits(seen[0].x - passed, seen[0].y - passed),
                                  column_bits(seen[1].x - passed, seen[1].y - passed)};
        // Chunks of 16 keys that no row of the warp sees cost only zeros.
        const unsigned live = __reduce_or_sync(kFullMask, bits[0] | bits[1]);
        const auto is_live = [&](int i) { return (live >> i / 8 * 4 & 0xf) != 0; };
        hide<kN>(scores, bits, is_live);
        return softmax<kN>(scores, first, scale, factor, is_live);
    }

    // Whether every row of the warp met a key of its own in an earlier step.
    __device__ __forceinline__ bool is_begun(int first) const {
        return first > full_begin + C::kSkippedKeys;
    }

    // Keys that a row does not see get no weight.
    template <int kN, typename Scores, typename IsLive>
    __device__ __forceinline__ void hide(Scores& scores, const unsigned (&bits)[2],
                                         IsLive&& is_live) {
#pragma unroll
        for (int chunk = 0; chunk < kN / 2; chunk += 8) {
            if (!is_live(chunk)) continue;
#pragma unroll
            for (int i = chunk; i < chunk + 8; ++i) {
                if (!(bits[(i / 2) % 2] >> (2 * (i / 4) + i % 2) & 1)) scores(i) = -INFINITY;
            }
        }
    }

    template <int kN, typename Scores, typename IsLive>
    __device__ __forceinline__ bool softmax(Scores& scores, int first, float scale,
                                            float (&factor)[2], IsLive&& is_live) {
        if (!is_begun(first)) begin_rows<kN>(scores, scale, is_live);
        float added[2] = {0.0f, 0.0f};
#pragma unroll
        for (int chunk = 0; chunk < kN / 2; chunk += 8) {
            if (!is_live(chunk)) {
#pragma unroll
                for (int i = chunk; i < chunk + 8; ++i) scores(i) = 0.0f;
                continue;
            }
#pragma unroll
            for (int i = chunk; i < chunk + 8; ++i) {
                const int half = (i / 2) % 2;
                scores(i) = state[half].weight(scores(i), scale);
                added[half] += scores(i);
            }
        }
        const bool is_raised = raise_after<kN>(scores, added, factor);
        state[0].sum += added[0];
        state[1].sum += added[1];
        return is_raised;
    }

    // The first keys of a row set its maximum; a row that has one keeps it, for whether the warp
    // comes here depends on its mates.
    template <int kN, typename Scores, typename IsLive>
    __device__ __forceinline__ void begin_rows(const Scores& scores, float scale,
                                               IsLive&& is_live) {
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int chunk = 0; chunk < kN / 2; chunk += 8) {
            if (!is_live(chunk)) continue;
#pragma unroll
            for (int i = chunk; i < chunk + 8; ++i) {
                largest[(i / 2) % 2] = fmaxf(largest[(i / 2) % 2], scores(i));
            }
        }
        const float found[2] = {quad_max(largest[0]) * scale, quad_max(largest[1]) * scale};
        if (state[0].max == kNoMax) state[0].max = fmaxf(found[0], kNoMax);
        if (state[1].max == kNoMax) state[1].max = fmaxf(found[1], kNoMax);
    }

    // No maximum is searched for after a row's first keys: a weight may exceed 1, but a sum of
    // weights bounds each of them, so the maximum of rows whose sum is too large is raised after
    // the fact, by a power of two. A score 2^127 above it is infinite before that: its row comes
    // out as no number, and store_tile computes it again.
    template <int kN, typename Scores>
    __device__ __forceinline__ bool raise_after(Scores& scores, float (&added)[2],
                                                float (&factor)[2]) {
        const bool is_far = !(fmaxf(added[0], added[1]) <= kMaxSum);
        if (!__any_sync(kFullMask, is_far)) return false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float most = quad_max(added[half]);
            const int raise = most > kMaxSum ? (__float_as_int(most) >> 23) - 134 : 0;
            factor[half] = state[half].raise_by(raise);
            added[half] *= factor[half];
        }
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) scores(i) *= factor[(i / 2) % 2];
        return true;
    }

    // The accumulator's registers are the A operand's, pair by pair.
    template <int kN, typename Scores>
    __device__ __forceinline__ void pack_weights(uint32_t* weights, const Scores& scores) {
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) weights[i / 2] = pack_pair<T>(scores(i), scores(i + 1));
    }

    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) out(i) *= factor[(i / 2) % 2];
    }
};

}  // namespace bytetx::attention
