// The step between a layer's fused q, k, v rows and attention over pages, in one pass: RMS norm of
// each head of q and k, rotary positions, and the writes of k and v to their cache slots.
//
//   x = x / sqrt(mean(x^2) + eps) * weight        heads of q and k, where weights are given
//   (a, b) = (a cos - b sin, b cos + a sin)       pairs of the first 2 * num_pairs features
//   q in place; k and v to page rows slot_mapping[token], where it is not -1, rounded to codes with
//   a scale each where there are scales (kv_codes.cuh); k in place, and no v, where there are no
//   pages
//
// q, k, v [total_tokens, heads, head_dim], rows any stride apart; cos, sin f32 [positions,
// num_pairs]; f32 inside. 16 features a thread, in two pieces of eight that hold whole pairs:
// pieces j and j + num_pairs / 8 of halves, or two neighbours where pairs are neighbours. A head
// takes the next power of two of head_dim / 16 threads. Shapes that do not go into such pieces (odd
// numbers of pairs, unaligned rows) take a warp a head, a feature a lane. Bytes: q read and
// written, k and v read and written once, cos and sin from L2. Bound by HBM, for few rows by
// latency. Source: RoFormer (arXiv 2104.09864), section 3.2; the fusion is standard.

#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cache_ops.h"
#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/rotation.cuh"
#include "common/row_norm.cuh"
#include "cuda/kv_codes.cuh"

namespace bytetx {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;                 // elements that a thread moves at a time
constexpr int64_t kFewThreads = 1 << 16;  // a quarter of what an H200 takes at once
constexpr int kWriteElements = 256;       // a "head" of write_kv, which knows rows only

struct HeadParams {
    RotaryWriteKvParams own;
    unsigned num_items;  // heads of all tokens
    unsigned heads;      // heads of q, k and v together
    int group_shift;     // 2^this threads a head
    bool streams;        // the results are more than the L2 keeps
};

// One of a token's heads: q's come first, then k's, then v's.
template <typename T>
struct Head {
    int of_q, of_k, of_v;  // its number there; below 0 before, past the last behind

    __device__ Head(const RotaryWriteKvParams& p, int head)
        : of_q(head), of_k(head - p.num_heads), of_v(of_k - p.num_kv_heads) {}

    __device__ bool is_q() const { return of_k < 0; }
    __device__ bool is_rotated() const { return of_v < 0; }

    __device__ const T* norm(const RotaryWriteKvParams& p) const {
        return static_cast<const T*>(is_q() ? p.q_norm : is_rotated() ? p.k_norm : nullptr);
    }

    __device__ const T* from(const RotaryWriteKvParams& p, int64_t token) const {
        const auto* rows = static_cast<const T*>(is_q() ? p.q : is_rotated() ? p.k : p.v);
        const int64_t stride = is_q() ? p.q_stride : is_rotated() ? p.k_stride : p.v_stride;
        const int64_t head = is_q() ? of_q : is_rotated() ? of_k : of_v;
        return rows + token * stride + head * p.head_dim;
    }

    // Null where it goes nowhere. slot: the token's.
    __device__ T* to(const RotaryWriteKvParams& p, int64_t token, int slot) const {
        if (is_q()) return static_cast<T*>(p.q) + token * p.q_stride + int64_t{of_q} * p.head_dim;
        if (p.k_cache == nullptr) {
            return static_cast<T*>(p.k) + token * p.k_stride + int64_t{of_k} * p.head_dim;
        }
        if (slot < 0) return nullptr;
        auto* cache = static_cast<T*>(is_rotated() ? p.k_cache : p.v_cache);
        const int64_t head = is_rotated() ? of_k : of_v;
        return cache + (int64_t{slot} * p.num_kv_heads + head) * p.head_dim;
    }
};

// Where a vector's codes and its scale go.
struct CodeTarget {
    uint8_t *codes, *scale;
};

template <typename T>
__device__ __forceinline__ CodeTarget code_target(const RotaryWriteKvParams& p, const Head<T>& head,
                                                  int slot) {
    const bool is_key = head.is_rotated();
    const int number = is_key ? head.of_k : head.of_v;
    const int64_t row = int64_t{slot} * p.num_kv_heads + number;
    const int64_t page = slot / p.page_size;
    auto* codes = static_cast<uint8_t*>(is_key ? p.k_cache : p.v_cache) + row * p.head_dim;
    return {codes, (is_key ? p.k_scales : p.v_scales) +
                       (page * p.num_kv_heads + number) * p.page_size + slot % p.page_size};
}

template <typename T>
struct alignas(kPiece * sizeof(T) < 16 ? kPiece * sizeof(T) : 16) Piece {
    T value[kPiece];
};

template <typename T>
__device__ __forceinline__ void load_piece(Piece<T>& piece, const T* from) {
    auto* words = reinterpret_cast<uint4*>(&piece);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(piece) / sizeof(*words)); ++i) {
        words[i] = load_once(reinterpret_cast<const uint4*>(from) + i);
    }
}

template <typename T>
__device__ __forceinline__ void store_piece(T* to, const float (&x)[kPiece], bool streams) {
    Piece<T> piece;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.value[i] = static_cast<T>(x[i]);
    const auto* words = reinterpret_cast<const uint4*>(&piece);
    auto* at = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(piece) / sizeof(*words)); ++i) {
        streams ? store_streaming(at + i, words[i]) : void(at[i] = words[i]);
    }
}

// Sum over the group_threads neighbouring lanes that share a head.
__device__ __forceinline__ float group_sum(float x, int group_threads) {
    for (int by = 1; by < group_threads; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

// The bits of the largest number's size, over as many neighbouring lanes.
__device__ __forceinline__ int group_largest(int bits, int group_threads) {
    const unsigned lane = threadIdx.x % kWarpSize;
    const unsigned mask = 0xffffffffu >> (kWarpSize - group_threads)
                                             << (lane / group_threads * group_threads);
    for (int by = 1; by < group_threads; by *= 2) {
        bits = max(bits, __shfl_xor_sync(mask, bits, by));
    }
    return bits;
}

__device__ __forceinline__ int size_bits(float x) { return __float_as_int(fabsf(x)); }

// The pieces of a head that a thread has: one of each half of the pairs, or two neighbours.
struct Pieces {
    int number[2];
    bool is_split;  // pairs lie across the two

    __device__ Pieces(const RotaryWriteKvParams& p, int own) {
        const int half = p.num_pairs / kPiece;
        is_split = !p.is_interleaved && own < half;
        number[0] = is_split ? own : 2 * own;
        number[1] = is_split ? own + half : 2 * own + 1;
    }
};

// Cosines and sines of the eight pairs of a thread, four at a time where there are so many.
struct Turns {
    float cos[kPiece], sin[kPiece];
    bool has[2] = {};  // the first, the second four

    __device__ void load(const RotaryWriteKvParams& p, int position, int own) {
        const int64_t row = int64_t{position} * p.num_pairs;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int first = own * kPiece + 4 * i;
            has[i] = first < p.num_pairs;
            if (!has[i]) continue;
            *reinterpret_cast<float4*>(cos + 4 * i) =
                *reinterpret_cast<const float4*>(p.cos + row + first);
            *reinterpret_cast<float4*>(sin + 4 * i) =
                *reinterpret_cast<const float4*>(p.sin + row + first);
        }
    }

    __device__ void apply(float (&x)[2][kPiece], bool is_split) const {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            if (!has[i / 4]) continue;
            if (is_split) {
                rotate(x[0][i], x[1][i], cos[i], sin[i]);
            } else {
                rotate(x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1], cos[i], sin[i]);
            }
        }
    }
};

// RMS norm of a head of which each of its threads has two pieces. weight_of: that of piece 0 or 1.
template <typename WeightOf>
__device__ __forceinline__ void norm_head(float (&x)[2][kPiece], const HeadParams& params,
                                          bool is_normalized, const WeightOf& weight_of) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) sum = fmaf(x[i][j], x[i][j], sum);
    }
    const float mean =
        group_sum(sum, 1 << params.group_shift) / static_cast<float>(params.own.head_dim);
    const float inverse = rsqrtf(mean + params.own.eps);
    if (!is_normalized) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const auto weight = weight_of(i);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
            x[i][j] = x[i][j] * inverse * static_cast<float>(weight.value[j]);
        }
    }
}

// Few heads wait for their loads: whatever does not depend on another one leaves first. Many want
// threads, hence few registers, and start with the rows that the product before wrote last.
template <typename T, bool kIsFew, bool kCodes>
__global__ void __launch_bounds__(kThreads, kIsFew   ? 1
                                            : kCodes ? 4
                                                     : 5)
    head_kernel(const __grid_constant__ HeadParams params) {
    const RotaryWriteKvParams& p = params.own;
    const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
    const bool is_item = thread >> params.group_shift < params.num_items;  // lanes join in sums
    const unsigned number = min(thread >> params.group_shift, params.num_items - 1);
    const unsigned item = kIsFew ? number : params.num_items - 1 - number;
    const int own = static_cast<int>(thread & ((1u << params.group_shift) - 1));
    const unsigned token = item / params.heads;
    const Head<T> head(p, static_cast<int>(item - token * params.heads));
    const Pieces pieces(p, own);
    const int num_pieces = p.head_dim / kPiece;
    Piece<T> raw[2] = {}, early[2] = {};
    const T *from = head.from(p, token), *norm = head.norm(p);
    Turns turns;
    const auto weight_of = [&](int i) {
        Piece<T> weight{};
        if (norm != nullptr && pieces.number[i] < num_pieces) {
            weight = *reinterpret_cast<const Piece<T>*>(norm + pieces.number[i] * kPiece);
        }
        return weight;
    };
    const auto load_turns = [&](int position) {
        if (head.is_rotated() && p.num_pairs > 0) turns.load(p, position, own);
    };
    if constexpr (kIsFew) {
        for (int i = 0; i < 2; ++i) early[i] = weight_of(i);
    }
    wait_for_prior_kernel();
    // Not first: attention reads earlier keys without a wait of its own, and its CTAs, placed that
    // early, cost a decode step 4 us (16 rows) to 26 (256).
    release_next_kernel();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (pieces.number[i] < num_pieces) load_piece(raw[i], from + pieces.number[i] * kPiece);
    }
    const int position = p.num_pairs > 0 ? p.position_ids[token] : 0;
    const int slot = p.slot_mapping != nullptr ? p.slot_mapping[token] : -1;
    if constexpr (kIsFew) load_turns(position);
    float x[2][kPiece];
#pragma unroll
    for (int i = 0; i < 2 * kPiece; ++i) {
        x[i / kPiece][i % kPiece] = static_cast<float>(raw[i / kPiece].value[i % kPiece]);
    }
    if (p.q_norm != nullptr) {
        norm_head(x, params, norm != nullptr,
                  [&](int i) { return kIsFew ? early[i] : weight_of(i); });
    }
    T* to = is_item ? head.to(p, token, slot) : nullptr;
    if (to == nullptr) return;
    if constexpr (!kIsFew) load_turns(position);
    if (head.is_rotated()) turns.apply(x, pieces.is_split);
    if (kCodes && !head.is_q()) {
        int largest = 0;
#pragma unroll
        for (int i = 0; i < 2 * kPiece; ++i) {
            largest = max(largest, size_bits(x[i / kPiece][i % kPiece]));
        }
        const int scale = scale_of(group_largest(largest, 1 << params.group_shift));
        const CodeTarget target = code_target(p, head, slot);
        if (own == 0) *target.scale = static_cast<uint8_t>(scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (pieces.number[i] >= num_pieces) continue;
            *reinterpret_cast<uint2*>(target.codes + pieces.number[i] * kPiece) = {
                round_to_codes(x[i], scale), round_to_codes(x[i] + 4, scale)};
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (pieces.number[i] >= num_pieces) continue;
        store_piece(to + pieces.number[i] * kPiece, x[i], params.streams);
    }
}

// A warp a head, any sizes: in shared memory, for a pair's features are far apart.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    any_head_kernel(const __grid_constant__ HeadParams params) {
    extern __shared__ float rows[];  // [warps][head_dim]
    const RotaryWriteKvParams& p = params.own;
    wait_for_prior_kernel();
    release_next_kernel();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const unsigned item = blockIdx.x * (kThreads / kWarpSize) + warp;
    if (item >= params.num_items) return;
    const unsigned token = item / params.heads;
    const Head<T> head(p, static_cast<int>(item - token * params.heads));
    T* to = head.to(p, token, p.slot_mapping != nullptr ? p.slot_mapping[token] : -1);
    if (to == nullptr) return;
    const T* from = head.from(p, token);
    const T* norm = head.norm(p);
    float* x = rows + int64_t{warp} * p.head_dim;
    float sum = 0.0f;
    for (int i = lane; i < p.head_dim; i += kWarpSize) {
        x[i] = static_cast<float>(from[i]);
        sum += x[i] * x[i];
    }
    if (norm != nullptr) {
        const float inverse =
            rsqrtf(group_sum(sum, kWarpSize) / static_cast<float>(p.head_dim) + p.eps);
        for (int i = lane; i < p.head_dim; i += kWarpSize) {
            x[i] *= inverse * static_cast<float>(norm[i]);
        }
    }
    __syncwarp();
    if (head.is_rotated()) {
        const int64_t row = p.num_pairs > 0 ? int64_t{p.position_ids[token]} * p.num_pairs : 0;
        for (int i = lane; i < p.num_pairs; i += kWarpSize) {
            float* a = x + (p.is_interleaved ? 2 * i : i);
            rotate(*a, a[p.is_interleaved ? 1 : p.num_pairs], p.cos[row + i], p.sin[row + i]);
        }
        __syncwarp();
    }
    if (p.k_scales != nullptr && !head.is_q()) {
        int largest = 0;
        for (int i = lane; i < p.head_dim; i += kWarpSize) largest = max(largest, size_bits(x[i]));
        const int scale = scale_of(group_largest(largest, kWarpSize));
        const CodeTarget target = code_target(p, head, p.slot_mapping[token]);
        if (lane == 0) *target.scale = static_cast<uint8_t>(scale);
        for (int i = lane; i < p.head_dim; i += kWarpSize) {
            const float own[4] = {x[i]};
            target.codes[i] = static_cast<uint8_t>(round_to_codes(own, scale));
        }
        return;
    }
    for (int i = lane; i < p.head_dim; i += kWarpSize) to[i] = static_cast<T>(x[i]);
}

bool is_aligned(const RotaryWriteKvParams& p) {
    const auto fits = [](const void* address) {
        return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
    };
    const bool has_pieces =
        p.head_dim % kPiece == 0 &&
        (p.num_pairs % kPiece == 0 || (p.is_interleaved && 2 * p.num_pairs % kPiece == 0));
    return has_pieces && p.q_stride % kPiece == 0 && p.k_stride % kPiece == 0 &&
           p.v_stride % kPiece == 0 && fits(p.q) && fits(p.k) && fits(p.v) && fits(p.k_cache) &&
           fits(p.v_cache) && fits(p.cos) && fits(p.sin) && fits(p.q_norm) && fits(p.k_norm);
}

template <typename T>
void launch_heads(const RotaryWriteKvParams& p, int device, cudaStream_t stream) {
    const int64_t heads = p.num_heads + (p.k_cache == nullptr ? 1 : 2) * int64_t{p.num_kv_heads};
    int shift = 0;
    while (2 * kPiece << shift < p.head_dim) ++shift;
    const bool is_fast = is_aligned(p) && 1 << shift <= kWarpSize;
    if (p.total_tokens * heads * kWarpSize > std::numeric_limits<uint32_t>::max() - kThreads) {
        throw std::invalid_argument("rotary_write_kv: " + std::to_string(p.total_tokens) +
                                    " tokens are too many for one call");
    }
    const int64_t bytes = p.total_tokens * heads * p.head_dim * int64_t{sizeof(T)};
    const HeadParams params{p, static_cast<unsigned>(p.total_tokens * heads),
                            static_cast<unsigned>(heads), shift, is_beyond_l2(bytes, device)};
    const auto launch = [&](auto kernel, unsigned heads_at_once, int smem_bytes) {
        const unsigned grid = (params.num_items + heads_at_once - 1) / heads_at_once;
        launch_kernel(kernel, {grid, kThreads, smem_bytes, stream}, params);
    };
    if (is_fast) {
        const bool is_few = p.total_tokens * heads << shift <= kFewThreads;
        const unsigned heads_at_once = kThreads >> shift;
        if (p.k_scales != nullptr) {
            const auto kernel = is_few ? head_kernel<T, true, true> : head_kernel<T, false, true>;
            return launch(kernel, heads_at_once, 0);
        }
        const auto kernel = is_few ? head_kernel<T, true, false> : head_kernel<T, false, false>;
        return launch(kernel, heads_at_once, 0);
    }
    const int smem_bytes = kThreads / kWarpSize * p.head_dim * static_cast<int>(sizeof(float));
    allow_smem(any_head_kernel<T>, smem_bytes);
    launch(any_head_kernel<T>, kThreads / kWarpSize, smem_bytes);
}

}  // namespace

void rotary_write_kv(const RotaryWriteKvParams& p, const Launch& launch) {
    if ((p.q_norm == nullptr) != (p.k_norm == nullptr) && p.num_kv_heads > 0 && p.num_heads > 0) {
        throw std::invalid_argument("rotary_write_kv needs q_norm and k_norm, or neither");
    }
    if ((p.k_scales == nullptr) != (p.v_scales == nullptr) ||
        (p.k_scales != nullptr && (p.k_cache == nullptr || p.page_size <= 0))) {
        throw std::invalid_argument("rotary_write_kv needs a cache and both scales, or none");
    }
    if (p.total_tokens == 0 || p.head_dim == 0 || p.num_heads + p.num_kv_heads == 0) return;
    const DeviceGuard guard(launch.device);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        launch_heads<T>(p, launch.device, static_cast<cudaStream_t>(launch.stream));
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

void rotary(const RotaryParams& p, const Launch& launch) {
    RotaryWriteKvParams all{};
    all.q = p.x;
    all.cos = p.cos;
    all.sin = p.sin;
    all.position_ids = p.position_ids;
    all.total_tokens = p.total_tokens;
    all.num_heads = p.num_heads;
    all.head_dim = p.head_dim;
    all.num_pairs = p.num_pairs;
    all.is_interleaved = p.is_interleaved;
    all.q_stride = p.x_stride;
    all.dtype = p.dtype;
    rotary_write_kv(all, launch);
}

void write_kv(const WriteKvParams& p, const Launch& launch) {
    RotaryWriteKvParams all{};
    all.k = const_cast<void*>(p.k);  // which only calls without a cache change
    all.v = p.v;
    all.k_cache = p.k_cache;
    all.v_cache = p.v_cache;
    all.slot_mapping = p.slot_mapping;
    all.total_tokens = p.total_tokens;
    // Rows are copied whole: any cut into heads will do that goes into pieces.
    const int64_t cut = std::gcd(p.row_elements, int64_t{kWriteElements});
    all.head_dim = static_cast<int32_t>(cut % kPiece == 0 ? cut : p.row_elements);
    all.num_kv_heads = static_cast<int32_t>(p.row_elements / std::max(all.head_dim, 1));
    all.k_stride = p.k_stride;
    all.v_stride = p.v_stride;
    all.dtype = p.dtype;
    rotary_write_kv(all, launch);
}

}  // namespace bytetx
