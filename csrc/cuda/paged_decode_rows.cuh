// Work of one warp on its rows and 16 keys: scores, softmax, weighted sum.
//
// Keys are the rows of mma's first operand and queries the columns of its second, eight or sixteen
// of them: a group of up to eight query heads costs half the products, sums and exponentials that
// it would as the rows of a tile of sixteen. Weights turn from a product's result into the next
// one's operand by movmatrix. A maximum is searched only where a score of some thread exceeds its
// row's, so that most steps have no shuffle at all.
#pragma once

#include "cuda/kv_codes.cuh"
#include "cuda/paged_decode_types.cuh"

namespace bytetx::paged {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Over the eight lanes that hold the same rows of a result.
__device__ __forceinline__ float max_of_row(float x) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, by));
    return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) x += __shfl_xor_sync(kFullMask, x, by);
    return x;
}

// Eight rows of eight elements, a pair a lane, with rows and columns exchanged.
__device__ __forceinline__ uint32_t turn_matrix(uint32_t pair) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ int shared_byte(uint32_t address) {
    int byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
    return byte;
}

// In the layout of mma's sums: a thread has the rows 2 * (lane % 4) and the next, in each tile of
// eight, and of each 16 features lane / 4 and lane / 4 + 8. Of codes, a word of four is two pairs
// of a product's features, and of values the features 2 * (lane / 4) and the next.
template <typename C>
struct ColumnUnit {
    using T = typename C::T;
    static constexpr int kSteps = C::kDim / 16;
    uint32_t q[C::kTiles][kSteps][2];
    float out[C::kTiles][kSteps][4];
    SoftmaxState state[C::kTiles][2];
    int begin[C::kTiles][2], end[C::kTiles][2];  // keys of the thread's rows
    int full_begin, full_end;                    // keys that all rows of the unit see

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
        for (int tile = 0; tile < C::kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int2 own = bounds(tile * 8 + lane % 4 * 2 + i);
                begin[tile][i] = own.x;
                end[tile][i] = own.y;
                state[tile][i].clear();
            }
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                if constexpr (C::kHasCodes) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) load_query(q_tile, tile, step + i, lane);
                } else {
                    uint32_t words[4];
                    load_matrices<false>(
                        words, q_tile + C::q_offset(tile * 8 + lane % 8, 2 * step + lane / 8));
#pragma unroll
                    for (int i = 0; i < 4; ++i) q[tile][step + i / 2][i % 2] = words[i];
                }
            }
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) out[tile][i][j] = 0.0f;
            }
        }
    }

    // Four neighbouring features, as those of a word of codes.
    __device__ __forceinline__ void load_query(uint32_t q_tile, int tile, int step, int lane) {
        const uint32_t at =
            q_tile + C::q_offset(tile * 8 + lane / 4, 2 * step + lane % 4 / 2) + lane % 2 * 8;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(q[tile][step][0]), "=r"(q[tile][step][1])
                     : "r"(at)
                     : "memory");
    }

    // Products of a tile of rows and the keys from `key` on become scores in powers of two. Biases
    // count from the piece's first token: what all scores of a row have in common has no weight.
    __device__ __forceinline__ static void change(const UnitRows& rows, float (&s)[4], int tile,
                                                  int key, int lane) {
        const ScoreChange& change = rows.p.change;
        const int distance = key + lane / 4 - rows.item.position;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float slope = change.slope(rows.head(tile * 8 + lane % 4 * 2 + i));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const auto from_first = static_cast<float>(distance + 8 * j);
                float& score = s[i + 2 * j];
                score = fmaf(slope, from_first, change.cap(score, rows.p.scale));
            }
        }
    }

    // take(0) and take(1): shared addresses of 16 keys and of their values, when they are there;
    // give_back(0) and give_back(1): when they have been read.
    template <typename Take, typename GiveBack>
    __device__ void attend(const Take& take, const GiveBack& give_back, const UnitRows& rows,
                           int key, int lane) {
        const uint32_t k_tile = take(0);
        float scores[C::kTiles][2][4] = {};  // two chains of sums: each waits for its own half
        if constexpr (C::kHasCodes) {
            multiply_key_codes(scores, k_tile, lane);
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t k[4];
                load_matrices<false>(k, k_tile + C::offset(lane % 16, 2 * step + lane / 16));
#pragma unroll
                for (int tile = 0; tile < C::kTiles; ++tile) {
                    mma<T>(scores[tile][step % 2], k, q[tile][step][0], q[tile][step][1]);
                }
            }
        }
        give_back(0);
        uint32_t weights[C::kTiles][2];
        soften(scores, weights, rows, key, lane);
        const uint32_t v_tile = take(1);
        if constexpr (C::kHasCodes) {
            const PagedItem& item = rows.item;
            add_value_codes(weights, v_tile, item.first_visible - key, item.end_key - key, lane);
        } else {
            const int v_row = lane % 8 + lane / 16 * 8;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t v[4];
                load_matrices<true>(v, v_tile + C::offset(v_row, 2 * step + lane / 8 % 2));
#pragma unroll
                for (int tile = 0; tile < C::kTiles; ++tile) {
                    mma<T>(out[tile][step], v, weights[tile][0], weights[tile][1]);
                }
            }
        }
        give_back(1);
    }

    __device__ __forceinline__ void multiply_key_codes(float (&scores)[C::kTiles][2][4],
                                                       uint32_t k_tile, int lane) {
        const uint32_t scales = k_tile + C::kTileBytes + lane / 4;
        const int first = shared_byte(scales), second = shared_byte(scales + 8);
        const uint32_t factors[2] = {scale_pair<T>(first, first), scale_pair<T>(second, second)};
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
            uint32_t codes[4];
            load_matrices<false>(codes, k_tile + C::offset(lane % 16, step + lane / 16));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
                const uint32_t k[4] = {restore_pair<T, 0, 1>(low, factors[0]),
                                       restore_pair<T, 0, 1>(high, factors[1]),
                                       restore_pair<T, 2, 3>(low, factors[0]),
                                       restore_pair<T, 2, 3>(high, factors[1])};
#pragma unroll
                for (int tile = 0; tile < C::kTiles; ++tile) {
                    mma<T>(scores[tile][i], k, q[tile][step + i][0], q[tile][step + i][1]);
                }
            }
        }
    }

    // begin, end: the step's keys that any row sees. The others' codes are zeros, and so must their
    // scales be: 0 times inf is NaN.
    __device__ __forceinline__ void add_value_codes(const uint32_t (&weights)[C::kTiles][2],
                                                    uint32_t v_tile, int begin, int end, int lane) {
        uint32_t factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto scale = [&](int key) {
                const int own = shared_byte(v_tile + C::kTileBytes + key);
                return key >= begin && key < end ? own : kLeastScale;
            };
            const int key = 8 * i + lane % 4 * 2;
            factors[i] = scale_pair<T>(scale(key), scale(key + 1));
        }
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
            uint32_t codes[4];
            load_matrices<true>(codes, v_tile + C::offset(lane % 16, step + lane / 16));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
                const uint32_t v[4] = {restore_pair<T, 0, 2>(low, factors[0]),
                                       restore_pair<T, 1, 3>(low, factors[0]),
                                       restore_pair<T, 0, 2>(high, factors[1]),
                                       restore_pair<T, 1, 3>(high, factors[1])};
#pragma unroll
                for (int tile = 0; tile < C::kTiles; ++tile) {
                    mma<T>(out[tile][step + i], v, weights[tile][0], weights[tile][1]);
                }
            }
        }
    }

    // Scores to weights, as the next product wants them; state and out follow.
    __device__ void soften(float (&scores)[C::kTiles][2][4], uint32_t (&weights)[C::kTiles][2],
                           const UnitRows& rows, int key, int lane) {
        const bool is_changed = rows.p.change.is_any();
        const float scale = is_changed ? 1.0f : rows.p.scale;
        const bool is_full = key >= full_begin && key + kStepKeys <= full_end;
        float largest[C::kTiles][2];
        bool is_larger = false;
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            float(&s)[4] = scores[tile][0];
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] += scores[tile][1][i];
            if (is_changed) change(rows, s, tile, key, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = key + lane / 4 + i / 2 * 8;
                if (!is_full && (at < begin[tile][i % 2] || at >= end[tile][i % 2])) {
                    s[i] = -INFINITY;
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                largest[tile][i] = fmaxf(s[i], s[i + 2]) * scale;
                is_larger |= largest[tile][i] > state[tile][i].max + kMaxSlack;
            }
        }
        if (__any_sync(kFullMask, is_larger)) raise_top(largest);
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            float(&s)[4] = scores[tile][0];
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = state[tile][i % 2].weight(s[i], scale);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                state[tile][i].sum += s[i] + s[i + 2];
                weights[tile][i] = turn_matrix(pack_pair<T>(s[2 * i], s[2 * i + 1]));
            }
        }
    }

    // A row's own scores decide, never its neighbours': the vote only skips work that changes
    // nothing.
    __device__ void raise_top(float (&largest)[C::kTiles][2]) {
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            float factor[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float most = max_of_row(largest[tile][i]), before = state[tile][i].max;
                factor[i] = state[tile][i].raise(most > before + kMaxSlack ? most : before);
            }
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) out[tile][i][j] *= factor[j % 2];
            }
        }
    }

    // Sums, to rows of kStride floats in shared memory, and states of the first num_rows rows.
    template <int kStride>
    __device__ void store(float* sums, SoftmaxState* states, int num_rows, int lane) const {
        static_assert(2 * kStride % 32 == 8);  // else eight lanes share a bank
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = tile * 8 + lane % 4 * 2 + i;
                const float total = sum_of_row(state[tile][i].sum);
                if (row >= num_rows) continue;
                if (lane < 4) states[row] = {state[tile][i].max, total};
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    constexpr int kNext = C::kHasCodes ? 1 : 8;  // from a thread's feature on
                    const int feature = lane / 4 * (C::kHasCodes ? 2 : 1);
                    float* to = sums + row * kStride + step * 16 + feature;
                    to[0] = out[tile][step][i];
                    to[kNext] = out[tile][step][i + 2];
                }
            }
        }
    }
};

}  // namespace bytetx::paged
