// What one warp of the decode kernel does with 16 rows and 16 keys: scores, softmax, weighted sum.
#pragma once

#include "cuda/paged_decode_types.cuh"

namespace bytetx::paged {

// A warp's 16 rows, in the layout of mma's sums: a thread has rows lane / 4 and lane / 4 + 8.
template <typename C>
struct RowUnit {
    using T = typename C::T;
    static constexpr int kSteps = C::kDim / 16;
    uint32_t q[kSteps][4];
    float out[2 * kSteps][4];
    float top[2], sum[2];
    int begin[2], end[2];      // keys of the thread's rows
    int full_begin, full_end;  // keys that all rows of the unit see

    __device__ void start(const DecodeParams& p, const PagedItem& item, uint32_t q_tile, int lane) {
        const auto bounds = [&](int local) {
            const int position =
                item.position + (item.row + min(local, item.num_rows - 1)) / p.group;
            const int low = p.window > 0 ? max(0, position + 1 - p.window) : 0;
            return make_int2(low, min(position + 1, item.end_key));
        };
        full_begin = bounds(item.num_rows - 1).x;
        full_end = bounds(0).y;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int2 own = bounds(lane / 4 + 8 * half);
            begin[half] = own.x;
            end[half] = own.y;
            top[half] = kNoMax;
            sum[half] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            load_matrices<false>(q[step],
                                 q_tile + piece_offset<C::kDim>(lane % 16, 2 * step + lane / 16));
        }
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
        }
    }

    __device__ void attend(uint32_t stage, int key, float scale, int lane) {
        float scores[2][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t k[4];
            const int of_row = lane % 8 + lane / 16 * 8, piece = 2 * step + lane / 8 % 2;
            load_matrices<false>(k, stage + piece_offset<C::kDim>(of_row, piece));
            mma<T>(scores[0], q[step], k[0], k[1]);
            mma<T>(scores[1], q[step], k[2], k[3]);
        }
        uint32_t weights[4];
        soften(scores, weights, key, scale, lane);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t v[4];
            const int of_row = lane % 16, piece = 2 * step + lane / 16;
            load_matrices<true>(v, stage + C::kTileBytes + piece_offset<C::kDim>(of_row, piece));
            mma<T>(out[2 * step], weights, v[0], v[1]);
            mma<T>(out[2 * step + 1], weights, v[2], v[3]);
        }
    }

    // Scores to weights, packed as the next product wants them; top, sum and out follow.
    __device__ void soften(float (&scores)[2][4], uint32_t (&weights)[4], int key, float scale,
                           int lane) {
        const bool is_full = key >= full_begin && key + kStepKeys <= full_end;
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, at = key + tile * 8 + lane % 4 * 2 + i % 2;
                scores[tile][i] *= scale;
                if (!is_full && (at < begin[half] || at >= end[half])) scores[tile][i] = -INFINITY;
                largest[half] = fmaxf(largest[half], scores[tile][i]);
            }
        }
        raise_top(quad_max(largest[0]), quad_max(largest[1]));
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[tile][i] = exp2_approx(scores[tile][i] - top[i / 2]);
                sum[i / 2] += scores[tile][i];
            }
            weights[2 * tile] = pack_pair<T>(scores[tile][0], scores[tile][1]);
            weights[2 * tile + 1] = pack_pair<T>(scores[tile][2], scores[tile][3]);
        }
    }

    // A row's own scores decide, never its neighbours': the vote only skips work that changes
    // nothing.
    __device__ void raise_top(float largest0, float largest1) {
        const float largest[2] = {largest0, largest1};
        const bool raise[2] = {largest0 > top[0] + kMaxSlack, largest1 > top[1] + kMaxSlack};
        if (!__any_sync(kFullMask, raise[0] || raise[1])) return;
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float next = raise[half] ? largest[half] : top[half];
            factor[half] = exp2_approx(top[half] - next);
            sum[half] *= factor[half];
            top[half] = next;
        }
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] *= factor[j / 2];
        }
    }
};

}  // namespace bytetx::paged
