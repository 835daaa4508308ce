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
    if constexpr (std::is_same_v<T, Half>) {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(probe) : "r"(word), "r"(0));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(probe) : "r"(word), "r"(0));
    }
    return probe;
}

// One warp computes one row from the keys of its own sequence, in f32.
template <typename C, typename Target>
__device__ __forceinline__ void recompute_row(const Target& target, int row) {
    using T = typename C::Element;
    constexpr int kSlots = (C::kDim + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int head_dim = target.head_dim();
    const T* q = target.query(row);
    float row_max = -INFINITY, sum = 0.0f, out[kSlots] = {};
    int part = 0;
    int2 bounds = target.bounds(row, part);
#pragma unroll 1
    for (int first = bounds.x;; first += 32) {
        if constexpr (Target::kParts > 1) {
            while (first >= bounds.y && ++part < Target::kParts) {
                bounds = target.bounds(row, part);
                first = bounds.x;
            }
        }
        if (first >= bounds.y) break;
        const int key = first + lane;
        float score = -INFINITY;
        if (key < bounds.y) {
            score = 0.0f;
            const T* k = target.key(key);
#pragma unroll 1
            for (int d = 0; d < head_dim; ++d) {
                score += static_cast<float>(q[d]) * static_cast<float>(k[d]);
            }
            score = target.score(score, row, key);
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
            const T* v = target.value(first + i);
            sum += shared_weight;
            for (int slot = 0; slot < kSlots; ++slot) {
                const int d = min(slot * 32 + lane, head_dim - 1);
                out[slot] += shared_weight * static_cast<float>(v[d]);
            }
        }
    }
    T* to = target.result(row);
    for (int slot = 0; slot < kSlots; ++slot) {
        const int d = slot * 32 + lane;
        if (d < head_dim) to[d] = static_cast<T>(out[slot] / sum);
    }
}

// Recomputes those of 16 rows that a quad of lanes calls broken: lane / 4 is the row, +8 for [1].
// Takes scalars: a reference to the rows would move their registers to local memory.
template <typename C, typename Target>
__device__ __forceinline__ void recompute_broken(const Target& target, int first, int num_rows,
                                                 unsigned broken0, unsigned broken1) {
#pragma unroll 1
    for (int row = 0; row < min(16, num_rows); ++row) {
        const unsigned lanes = row < 8 ? broken0 : broken1;
        if (lanes >> (row % 8 * 4) & 0xf) recompute_row<C>(target, first + row);
    }
}

// Before, each lane of a quad has one word of each of four pieces of 16 bytes; after, one piece.
__device__ __forceinline__ uint4 gather_piece(uint4 words, int lane) {
    const bool odd = lane % 2 == 1, high = lane / 2 % 2 == 1;
    const uint32_t a = __shfl_xor_sync(kFullMask, odd ? words.x : words.y, 1);
    const uint32_t b = __shfl_xor_sync(kFullMask, odd ? words.z : words.w, 1);
    const uint2 low = odd ? uint2{a, words.y} : uint2{words.x, a};  // words of piece 0 or 1
    const uint2 far = odd ? uint2{b, words.w} : uint2{words.z, b};  // words of piece 2 or 3
    const uint32_t c = __shfl_xor_sync(kFullMask, high ? low.x : far.x, 2);
    const uint32_t d = __shfl_xor_sync(kFullMask, high ? low.y : far.y, 2);
    return high ? uint4{c, d, far.x, far.y} : uint4{low.x, low.y, c, d};
}

// Writes the warpgroup's rows, 64 bytes of a row a quad and store. target: where a row's results
// go, and what it is computed from, should it be computed again.
template <typename C, typename Target>
__device__ __forceinline__ void store_rows(SoftmaxRows<C>& rows, int num_rows,
                                           const Target& target) {
    using T = typename C::Element;
    const int warp_row = rows.tid / 32 * 16;
    uint32_t probe[2] = {0, 0};  // stays +-0 until it meets a value that is no number
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float inverse = reciprocal_approx(quad_sum(rows.state[half].sum));
        const int row = warp_row + rows.lane / 4 + 8 * half;
        T* out = target.result(row);
#pragma unroll
        for (int j = 0; j < C::kDim / 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 4 * (j + i) + 2 * half;
                words[i] = pack_pair<T>(rows.out(at) * inverse, rows.out(at + 1) * inverse);
                probe[half] = probe_finite<T>(words[i], probe[half]);
            }
            const uint4 piece = gather_piece({words[0], words[1], words[2], words[3]}, rows.lane);
            const int column = 8 * (j + rows.lane % 4);
            if (row < num_rows && column < target.head_dim()) {
                *reinterpret_cast<uint4*>(out + column) = piece;
            }
        }
    }
    const unsigned broken0 = __ballot_sync(kFullMask, (probe[0] & 0x7fff7fff) != 0);
    const unsigned broken1 = __ballot_sync(kFullMask, (probe[1] & 0x7fff7fff) != 0);
    if ((broken0 | broken1) != 0) {
        __syncwarp();  // orders the rows above before the same rows from other lanes
        recompute_broken<C>(target, warp_row, num_rows - warp_row, broken0, broken1);
    }
}

// Packed rows of one head, from row `base` on.
template <typename C>
struct PackedTarget {
    using T = typename C::Element;
    static constexpr int kParts = 1;  // runs of keys that a row sees
    const Params& p;
    int base, head;

    __device__ __forceinline__ int head_dim() const { return p.head_dim; }
    __device__ __forceinline__ T* result(int row) const {
        return static_cast<T*>(p.out) + (base + row) * p.out_stride + head * p.head_dim;
    }
    __device__ __forceinline__ int2 bounds(int row, int) const {
        return key_bounds(p, p.row_bounds[base + row], base + row);
    }
    __device__ __forceinline__ const T* query(int row) const {
        return static_cast<const T*>(p.q_rows) + (base + row) * p.q_stride + head * p.head_dim;
    }
    __device__ __forceinline__ const T* key(int key) const {
        return static_cast<const T*>(p.k_rows) + key * p.k_stride + head / p.group * p.head_dim;
    }
    __device__ __forceinline__ const T* value(int key) const {
        return static_cast<const T*>(p.v_rows) + key * p.v_stride + head / p.group * p.head_dim;
    }
    __device__ __forceinline__ float score(float product, int row, int key) const {
        float score = product * p.softmax_scale;
        if constexpr (C::kChangesScores) {
            if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
            if (p.relative_bias != nullptr) {
                const int distance = bias_position(p, key) - bias_position(p, base + row);
                score += p.relative_bias[int64_t{head} * (2 * p.bias_span - 1) + p.bias_span - 1 +
                                         distance];
            }
        }
        return score;
    }
};

// The same where rows see their sequences' ancestors, too.
template <typename C>
struct TreeTarget : PackedTarget<C> {
    static constexpr int kParts = kMaxAncestors + 1;
    const KeyParts<C::kBlockN>* parts;

    __device__ __forceinline__ int2 bounds(int row, int part) const {
        const int at = this->base + row, shift = parts->shift(part);
        const int2 places = parts->bounds(this->p, part, this->p.row_bounds[at], at);
        return {places.x + shift, places.y + shift};
    }
};

template <typename C>
__device__ __forceinline__ void store_tile(RowTile<C>& tile) {
    store_rows<C>(tile, tile.num_rows, PackedTarget<C>{tile.p, tile.base, tile.head});
}

}  // namespace bytetx::attention
