// What one warp of a cluster does with its rows and 16 keys: copies, scores, softmax, weighted sum.
//
// Keys are the rows of mma's first operand and queries the columns of its second, eight or sixteen
// of them: a group of up to eight query heads costs half the products, sums and exponentials that
// it would as the rows of a tile of sixteen. Weights turn from a product's result into the next
// one's operand by movmatrix. A maximum is searched only where a score of some thread exceeds its
// row's, so that most steps have no shuffle at all.
#pragma once

#include "cuda/paged_decode_types.cuh"

namespace bytetx::paged {

constexpr int kClusterStages = 2;

template <typename T_, int kHeadDim, int kNumTiles>
struct ClusterTypes {
    using T = T_;
    static constexpr int kDim = kHeadDim;
    static constexpr int kTiles = kNumTiles;  // of eight rows
    static constexpr int kRows = 8 * kTiles;
    static constexpr int kWarps = kDim <= 64 ? 8 : 4;  // 16384 keys: 17.4 against 21.4 us of four
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kAllKeys = kWarps * kStepKeys;  // that the warps take at a time
    // Without a bound ptxas loads one fragment at a time, each product after its own: 28 us for
    // 16384 keys instead of 24.
    static constexpr int kMinCtas = 16 / kWarps / kTiles;
    static constexpr int kPieces = kDim / 8;         // of 16 bytes, a row
    static constexpr int kRowBytes = kDim * 2 + 16;  // eight neighbouring rows: different banks
    static constexpr int kTileBytes = kStepKeys * kRowBytes;
    static constexpr int kSumStride = kDim + 4;  // floats
    static constexpr int kSlice = kDim / kClusterCtas;
    static_assert(kSlice % 4 == 0 && kRows * kSumStride * 4 <= kClusterStages * 2 * kTileBytes);

    static __device__ __forceinline__ uint32_t offset(int row, int piece) {
        return row * kRowBytes + piece * 16;
    }
};

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

// Copies the rows of 16 keys and values to shared memory, a piece of a row a lane.
template <typename C>
struct StepCopy {
    using T = typename C::T;
    static constexpr int kRowsAtOnce = 32 / C::kPieces;
    const DecodeParams& p;
    int row, bytes;       // of the lane: its first row; 16, or 0 in the padding of a head
    int64_t row_stride;   // elements
    int64_t lane_offset;  // elements from a key's first one
    uint32_t to;          // bytes from a stage's first one

    __device__ StepCopy(const DecodeParams& params, int lane) : p(params) {
        const int piece = lane % C::kPieces;
        row = lane / C::kPieces;
        row_stride = int64_t{p.num_kv_heads} * p.head_dim;
        bytes = piece * 8 < p.head_dim ? 16 : 0;
        lane_offset = row * row_stride + (bytes > 0 ? piece * 8 : 0);
        to = C::offset(row, piece);
    }

    // Keys whose slots are neighbours, as in a page; rows outside [begin, end) become zeros.
    __device__ void neighbours(uint32_t stage, int64_t slot, int kv_head, int begin, int end) {
        const int64_t from = slot * row_stride + kv_head * p.head_dim + lane_offset;
        if (begin <= 0 && end >= kStepKeys) return copy<true>(stage + to, from, begin, end);
        copy<false>(stage + to, from, begin, end);
    }

    template <bool kAll>
    __device__ void copy(uint32_t at, int64_t from, int begin, int end) {
        const T* k = static_cast<const T*>(p.k_cache) + from;
        const T* v = static_cast<const T*>(p.v_cache) + from;
#pragma unroll
        for (int i = 0; i < kStepKeys; i += kRowsAtOnce) {
            const int own = kAll || (row + i >= begin && row + i < end) ? bytes : 0;
            copy_or_zero(at + i * C::kRowBytes, k, own);
            copy_or_zero(at + i * C::kRowBytes + C::kTileBytes, v, own);
            k += kRowsAtOnce * row_stride;
            v += kRowsAtOnce * row_stride;
        }
    }

    // Keys anywhere: `slot` is that of key lane % 16, or -1.
    __device__ void scattered(uint32_t stage, int slot, int kv_head) {
#pragma unroll
        for (int i = 0; i < kStepKeys; i += kRowsAtOnce) {
            const int own = __shfl_sync(kFullMask, slot, row + i);
            const int64_t from = max(own, 0) * row_stride + kv_head * p.head_dim + lane_offset -
                                 row * row_stride;
            const uint32_t at = stage + to + i * C::kRowBytes;
            const int size = own >= 0 ? bytes : 0;
            copy_or_zero(at, static_cast<const T*>(p.k_cache) + from, size);
            copy_or_zero(at + C::kTileBytes, static_cast<const T*>(p.v_cache) + from, size);
        }
    }
};

// A unit's queries in registers of kThreads threads, between memory and shared memory.
template <typename C, int kThreads>
struct StagedQueries {
    static constexpr int kCount = (C::kRows * C::kPieces + kThreads - 1) / kThreads;
    uint4 words[kCount];

    __device__ void load(const DecodeParams& p, const PagedItem& item, int kv_head, int thread) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = (i * kThreads + thread) / C::kPieces;
            const int piece = (i * kThreads + thread) % C::kPieces;
            words[i] = {};
            if (row < item.num_rows && piece * 8 < p.head_dim) {
                words[i] = *reinterpret_cast<const uint4*>(
                    static_cast<const typename C::T*>(p.q) +
                    row_address(p, item, kv_head, row, p.q_stride) + piece * 8);
            }
        }
    }

    __device__ void store(uint8_t* to, int thread) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = (i * kThreads + thread) / C::kPieces;
            const int piece = (i * kThreads + thread) % C::kPieces;
            if (row < C::kRows) *reinterpret_cast<uint4*>(to + C::offset(row, piece)) = words[i];
        }
    }
};

// In the layout of mma's sums: a thread has the rows 2 * (lane % 4) and the next, in each tile of
// eight, and of each 16 features lane / 4 and lane / 4 + 8.
template <typename C>
struct ColumnUnit {
    using T = typename C::T;
    static constexpr int kSteps = C::kDim / 16;
    uint32_t q[C::kTiles][kSteps][2];
    float out[C::kTiles][kSteps][4];
    float top[C::kTiles][2], sum[C::kTiles][2];
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
                top[tile][i] = kNoMax;
                sum[tile][i] = 0.0f;
            }
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                uint32_t words[4];
                load_matrices<false>(
                    words, q_tile + C::offset(tile * 8 + lane % 8, 2 * step + lane / 8));
#pragma unroll
                for (int i = 0; i < 4; ++i) q[tile][step + i / 2][i % 2] = words[i];
            }
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) out[tile][i][j] = 0.0f;
            }
        }
    }

    __device__ void attend(uint32_t stage, int key, float scale, int lane) {
        float scores[C::kTiles][2][4] = {};  // two chains of sums: each waits for its own half
        const uint32_t k_row = stage + C::offset(lane % 16, lane / 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t k[4];
            load_matrices<false>(k, k_row + step * 32);
#pragma unroll
            for (int tile = 0; tile < C::kTiles; ++tile) {
                mma<T>(scores[tile][step % 2], k, q[tile][step][0], q[tile][step][1]);
            }
        }
        uint32_t weights[C::kTiles][2];
        soften(scores, weights, key, scale, lane);
        const uint32_t v_row =
            stage + C::kTileBytes + C::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t v[4];
            load_matrices<true>(v, v_row + step * 32);
#pragma unroll
            for (int tile = 0; tile < C::kTiles; ++tile) {
                mma<T>(out[tile][step], v, weights[tile][0], weights[tile][1]);
            }
        }
    }

    // Scores to weights, as the next product wants them; top, sum and out follow.
    __device__ void soften(float (&scores)[C::kTiles][2][4], uint32_t (&weights)[C::kTiles][2],
                           int key, float scale, int lane) {
        const bool is_full = key >= full_begin && key + kStepKeys <= full_end;
        float largest[C::kTiles][2];
        bool is_larger = false;
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            float(&s)[4] = scores[tile][0];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = key + lane / 4 + i / 2 * 8;
                s[i] += scores[tile][1][i];
                if (!is_full && (at < begin[tile][i % 2] || at >= end[tile][i % 2])) {
                    s[i] = -INFINITY;
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                largest[tile][i] = fmaxf(s[i], s[i + 2]) * scale;
                is_larger |= largest[tile][i] > top[tile][i] + kMaxSlack;
            }
        }
        if (__any_sync(kFullMask, is_larger)) raise_top(largest);
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            float(&s)[4] = scores[tile][0];
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = exp2_approx(s[i] * scale - top[tile][i % 2]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sum[tile][i] += s[i] + s[i + 2];
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
                const float most = max_of_row(largest[tile][i]), before = top[tile][i];
                if (most > before + kMaxSlack) top[tile][i] = most;
                factor[i] = exp2_approx(before - top[tile][i]);
                sum[tile][i] *= factor[i];
            }
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) out[tile][i][j] *= factor[j % 2];
            }
        }
    }

    // Sums and {top, sum} of the first num_rows rows, to rows of kStride floats in shared memory.
    template <int kStride>
    __device__ void store(float* sums, float2* stats, int num_rows, int lane) const {
        static_assert(2 * kStride % 32 == 8);  // else eight lanes share a bank
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = tile * 8 + lane % 4 * 2 + i;
                const float total = sum_of_row(sum[tile][i]);
                if (row >= num_rows) continue;
                if (lane < 4) stats[row] = {top[tile][i], total};
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    float* to = sums + row * kStride + step * 16 + lane / 4;
                    to[0] = out[tile][step][i];
                    to[8] = out[tile][step][i + 2];
                }
            }
        }
    }
};

}  // namespace bytetx::paged
