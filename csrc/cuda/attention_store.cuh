// The end of a tile: divide by the sums, write pieces of 16 bytes. And the way out for rows that
// came out as no number.
//
// A tile multiplies the weights of one sequence by the values of its neighbours, too: weights that
// are exactly 0, so finite neighbours change nothing, but 0 * inf and 0 * NaN are NaN. A row that
// is not finite is therefore computed again from its own keys alone. That is slow (one warp a row,
// no matrix unit) and rare: it happens beside broken activations only.
#pragma once

#include "cuda/attention_tile.cuh"

namespace bytetx::attention {

// 0 where both halves of a word of two T are finite, else NaN in at least one of them; plus probe.
template <typename T>
__device__ __forceinline__ uint32_t probe_finite(uint32_t word, uint32_t probe) {
    if constexpr (std::is_same_v<T, cutlass::half_t>) {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(probe) : "r"(word), "r"(0));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(probe) : "r"(word), "r"(0));
    }
    return probe;
}

// One warp computes one row of one head from the keys of its own sequence, in f32.
template <typename C>
__device__ __forceinline__ void recompute_row(const Params& p, int row, int head) {
    using T = typename C::Element;
    constexpr int kSlots = (C::kDim + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int kv_head = head / p.group;
    const int2 bounds = key_bounds(p, p.row_bounds[row], row);
    const T* q = static_cast<const T*>(p.q_rows) + row * p.q_stride + head * p.head_dim;
    const T* k = static_cast<const T*>(p.k_rows) + kv_head * p.head_dim;
    const T* v = static_cast<const T*>(p.v_rows) + kv_head * p.head_dim;
    float row_max = -INFINITY, sum = 0.0f, out[kSlots] = {};
#pragma unroll 1
    for (int first = bounds.x; first < bounds.y; first += 32) {
        const int key = first + lane;
        float score = -INFINITY;
        if (key < bounds.y) {
            score = 0.0f;
#pragma unroll 1
            for (int d = 0; d < p.head_dim; ++d) {
                score += static_cast<float>(q[d]) * static_cast<float>(k[key * p.k_stride + d]);
            }
            score *= p.softmax_scale;
            if (C::kChangesScores && p.softcap > 0.0f) {
                score = p.softcap * tanhf(score / p.softcap);
            }
            if (C::kChangesScores && p.relative_bias != nullptr) {
                const int distance = bias_position(p, key) - bias_position(p, row);
                score += p.relative_bias[int64_t{head} * (2 * p.bias_span - 1) + p.bias_span - 1 +
                                         distance];
            }
        }
        float next = row_max;
#pragma unroll 1
        for (int i = 0; i < 32; ++i) next = fmaxf(next, __shfl_sync(kFullMask, score, i));
        const float factor = expf(row_max - next), weight = expf(score - next);
        row_max = next;
        sum *= factor;
        for (int slot = 0; slot < kSlots; ++slot) out[slot] *= factor;
#pragma unroll 1
        for (int i = 0; i < min(32, bounds.y - first); ++i) {
            const float shared_weight = __shfl_sync(kFullMask, weight, i);
            sum += shared_weight;
            for (int slot = 0; slot < kSlots; ++slot) {
                const int d = min(slot * 32 + lane, p.head_dim - 1);
                out[slot] += shared_weight * static_cast<float>(v[(first + i) * p.v_stride + d]);
            }
        }
    }
    T* to = static_cast<T*>(p.out) + row * p.out_stride + head * p.head_dim;
    for (int slot = 0; slot < kSlots; ++slot) {
        const int d = slot * 32 + lane;
        if (d < p.head_dim) to[d] = static_cast<T>(out[slot] / sum);
    }
}

// Recomputes those of 16 rows that a quad of lanes calls broken: lane / 4 is the row, +8 for [1].
// Takes scalars: a reference to the tile would move its registers to local memory.
template <typename C>
__device__ __forceinline__ void recompute_broken(const Params& p, int first, int num_rows, int head,
                                                 unsigned broken0, unsigned broken1) {
#pragma unroll 1
    for (int row = 0; row < min(16, num_rows); ++row) {
        const unsigned lanes = row < 8 ? broken0 : broken1;
        if (lanes >> (row % 8 * 4) & 0xf) recompute_row<C>(p, first + row, head);
    }
}

// Before, each lane of a quad has one word of each of four pieces of 16 bytes; after, one piece.
__device__ __forceinline__ uint4 gather_piece(uint4 words, int lane) {
    const bool odd = lane % 2 == 1, high = lane / 2 % 2 == 1;
    const uint32_t a = __shfl_xor_sync(kFullMask, odd ? words.x : words.y, 1);
    const uint32_t b = __shfl_xor_sync(kFullMask, odd ? words.z : words.w, 1);
    const uint2 low = odd ? uint2{a, words.y} : uint2{words.x, a};  // of piece 0 or 1
    const uint2 far = odd ? uint2{b, words.w} : uint2{words.z, b};  // of piece 2 or 3
    const uint32_t c = __shfl_xor_sync(kFullMask, high ? low.x : far.x, 2);
    const uint32_t d = __shfl_xor_sync(kFullMask, high ? low.y : far.y, 2);
    return high ? uint4{c, d, far.x, far.y} : uint4{low.x, low.y, c, d};
}

// Writes the warpgroup's rows, 64 bytes of a row a quad and store.
template <typename C>
__device__ __forceinline__ void store_tile(RowTile<C>& tile) {
    using T = typename C::Element;
    const Params& p = tile.p;
    const int warp_row = tile.tid / 32 * 16;
    uint32_t probe[2] = {0, 0};  // stays +-0 until it meets a value that is no number
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float inverse = reciprocal_approx(quad_sum(tile.sum[half]));
        const int row = warp_row + tile.lane / 4 + 8 * half;
        T* out = static_cast<T*>(p.out) + (tile.base + row) * p.out_stride + tile.head * p.head_dim;
#pragma unroll
        for (int j = 0; j < C::kDim / 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 4 * (j + i) + 2 * half;
                words[i] = pack_pair<T>(tile.out(at) * inverse, tile.out(at + 1) * inverse);
                probe[half] = probe_finite<T>(words[i], probe[half]);
            }
            const uint4 piece = gather_piece({words[0], words[1], words[2], words[3]}, tile.lane);
            const int column = 8 * (j + tile.lane % 4);
            if (row < tile.num_rows && column < p.head_dim) {
                *reinterpret_cast<uint4*>(out + column) = piece;
            }
        }
    }
    const unsigned broken0 = __ballot_sync(kFullMask, (probe[0] & 0x7fff7fff) != 0);
    const unsigned broken1 = __ballot_sync(kFullMask, (probe[1] & 0x7fff7fff) != 0);
    if ((broken0 | broken1) != 0) {
        __syncwarp();  // orders the rows above before the same rows from other lanes
        recompute_broken<C>(p, tile.base + warp_row, tile.num_rows - warp_row, tile.head, broken0,
                            broken1);
    }
}

}  // namespace bytetx::attention
