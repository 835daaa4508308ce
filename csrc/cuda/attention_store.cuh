// The end of a tile: divide by the sums, stage in shared memory, write whole 16-byte pieces. And
// the way out for rows that came out as no number.
//
// A tile multiplies the weights of one sequence by the values of its neighbours, too: weights that
// are exactly 0, so finite neighbours change nothing, but 0 * inf and 0 * NaN are NaN. A row that
// is not finite is therefore computed again from its own keys alone. That is slow (one warp a row,
// no matrix unit) and rare: it happens beside broken activations only.
#pragma once

#include "cuda/attention_tile.cuh"

namespace bytetx::attention {

// Byte offset of (row, column) in a swizzled 64-row tile, as TMA writes it and wgmma reads it.
template <typename C>
__device__ __forceinline__ uint32_t tile_offset(int row, int column) {
    constexpr int kRowBytes = C::kBoxColumns * kElementBytes;
    constexpr uint32_t kBits = kRowBytes / 16 - 1;  // 16-byte pieces of a row that are permuted
    const uint32_t offset = (column / C::kBoxColumns * kTileRows + row) * kRowBytes +
                            column % C::kBoxColumns * kElementBytes;
    return offset ^ ((offset >> 7 & kBits) << 4);
}

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

// 1 / x to 1 ulp; x is a sum of weights, far from the ends of f32.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
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
    float top = -INFINITY, sum = 0.0f, out[kSlots] = {};
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
            if constexpr (C::kHasBias) {
                const int distance = bias_position(p, key) - bias_position(p, row);
                score += p.relative_bias[int64_t{head} * (2 * p.bias_span - 1) + p.bias_span - 1 +
                                         distance];
            }
        }
        float next = top;
#pragma unroll 1
        for (int i = 0; i < 32; ++i) next = fmaxf(next, __shfl_sync(kFullMask, score, i));
        const float factor = expf(top - next), weight = expf(score - next);
        top = next;
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

// Writes the warpgroup's rows; each warp stages its own 16 rows, so no barrier is needed.
template <typename C>
__device__ __forceinline__ void store_tile(RowTile<C>& tile, typename C::Element* staging) {
    using T = typename C::Element;
    const Params& p = tile.p;
    const int warp_row = tile.tid / 32 * 16;
    float inverse[2];
    uint32_t probe[2] = {0, 0};  // stays +-0 until it meets a value that is no number
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        inverse[half] = reciprocal_approx(quad_sum(tile.sum[half]));
    }
    const uint32_t base = cute::cast_smem_ptr_to_uint(staging);
    const int lane_row = warp_row + tile.lane % 16, lane_column = tile.lane / 16 * 8;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < C::kDim / 16; ++j) {
        uint32_t words[4];  // rows 0-7, rows 8-15, then both again 8 columns on
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = tile.out(8 * j + 2 * i) * inverse[i % 2];
            const float high = tile.out(8 * j + 2 * i + 1) * inverse[i % 2];
            words[i] = pack<T>(low, high);
            probe[i % 2] = probe_finite<T>(words[i], probe[i % 2]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         base + tile_offset<C>(lane_row, 16 * j + lane_column)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    }
    __syncwarp();
    const int num_rows = tile.num_rows - warp_row;
    constexpr int kPieces = C::kDim / 8;  // of 16 bytes, a row
    const int row = tile.lane / kPieces, column = tile.lane % kPieces * 8;
    constexpr int kRowsAtOnce = 32 / kPieces;
    T* out = static_cast<T*>(p.out) + (tile.base + warp_row + row) * p.out_stride +
             tile.head * p.head_dim + column;
    if (column < p.head_dim && row < kRowsAtOnce) {
#pragma unroll
        for (int i = 0; i < 16; i += kRowsAtOnce, out += kRowsAtOnce * p.out_stride) {
            if (row + i >= min(num_rows, 16)) break;
            uint4 bits;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                         : "r"(base + tile_offset<C>(warp_row + row + i, column)));
            *reinterpret_cast<uint4*>(out) = bits;
        }
    }
    const unsigned broken0 = __ballot_sync(kFullMask, (probe[0] & 0x7fff7fff) != 0);
    const unsigned broken1 = __ballot_sync(kFullMask, (probe[1] & 0x7fff7fff) != 0);
    if ((broken0 | broken1) != 0) {
        __syncwarp();  // orders the rows above before the same rows from other lanes
        recompute_broken<C>(p, tile.base + warp_row, num_rows, tile.head, broken0, broken1);
    }
}
}  // namespace bytetx::attention
