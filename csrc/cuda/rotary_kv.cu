// What stands between a layer's fused q, k, v rows and attention over pages, in one pass: RMS norm
// of each head of q and k, rotary positions, and the way of k and v into their slots.
//
//   x = x / sqrt(mean(x^2) + eps) * weight        heads of q and k, where weights are given
//   (a, b) = (a cos - b sin, b cos + a sin)       pairs of the first 2 * num_pairs features
//   q in place; k and v to page rows slot_mapping[token], where it is not -1
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

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;            // elements that a thread moves at a time
constexpr int kWriteElements = 256;  // a "head" of write_kv, which knows rows only

struct HeadParams {
    RotaryWriteKvParams own;
    unsigned num_items;  // heads of all tokens
    unsigned heads;      // of q, k and v together
    int group_shift;     // 2^this threads a head
};

// Where a head's features come from and go to; `to` is null where they go nowhere.
template <typename T>
struct Head {
    const T* from;
    T* to;
    const T* norm;
    bool is_rotated;

    __device__ Head(const HeadParams& params, int64_t token, int head) {
        const RotaryWriteKvParams& p = params.own;
        const bool is_q = head < p.num_heads;
        const int kv_head = (head - p.num_heads) % max(p.num_kv_heads, 1);
        const bool is_k = !is_q && head - p.num_heads < p.num_kv_heads;
        is_rotated = is_q || is_k;
        norm = static_cast<const T*>(is_q ? p.q_norm : is_k ? p.k_norm : nullptr);
        if (is_q) {
            to = static_cast<T*>(p.q) + token * p.q_stride + int64_t{head} * p.head_dim;
            from = to;
            return;
        }
        from = (is_k ? static_cast<const T*>(p.k) + token * p.k_stride
                     : static_cast<const T*>(p.v) + token * p.v_stride) +
               int64_t{kv_head} * p.head_dim;
        const int slot = p.slot_mapping[token];
        auto* cache = static_cast<T*>(is_k ? p.k_cache : p.v_cache);
        to = slot < 0 ? nullptr : cache + (int64_t{slot} * p.num_kv_heads + kv_head) * p.head_dim;
    }
};

template <typename T>
struct alignas(kPiece * sizeof(T) < 16 ? kPiece * sizeof(T) : 16) Piece {
    T value[kPiece];
};

template <typename T>
__device__ __forceinline__ void load_piece(float (&x)[kPiece], const T* from) {
    const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(from);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = static_cast<float>(piece.value[i]);
}

template <typename T>
__device__ __forceinline__ void store_piece(T* to, const float (&x)[kPiece]) {
    Piece<T> piece;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.value[i] = static_cast<T>(x[i]);
    *reinterpret_cast<Piece<T>*>(to) = piece;
}

__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
    const float x = a;
    a = x * cos - b * sin;
    b = b * cos + x * sin;
}

// Sum over the group_threads neighbouring lanes that share a head.
__device__ __forceinline__ float group_sum(float x, int group_threads) {
    for (int by = 1; by < group_threads; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) head_kernel(const __grid_constant__ HeadParams params) {
    const RotaryWriteKvParams& p = params.own;
    wait_for_prior_kernel();  // before the release: attention reads settled keys without a wait
    release_next_kernel();
    const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
    const unsigned item = thread >> params.group_shift;
    const int own = static_cast<int>(thread & ((1u << params.group_shift) - 1));
    const bool is_item = item < params.num_items;  // no early return: lanes join in the sums
    const unsigned token = is_item ? item / params.heads : 0;
    const Head<T> head(params, token, is_item ? item - token * params.heads : 0);
    // Pieces of the pairs' two halves, in one thread; the features after them two by two.
    const int half = p.num_pairs / kPiece;
    const bool is_split = !p.is_interleaved && own < half;
    const int pieces[2] = {is_split ? own : 2 * own, is_split ? own + half : 2 * own + 1};
    const int num_pieces = p.head_dim / kPiece;
    float x[2][kPiece] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (is_item && pieces[i] < num_pieces) load_piece(x[i], head.from + pieces[i] * kPiece);
    }
    if (p.q_norm != nullptr) {  // then there is a k_norm, too
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < kPiece; ++j) sum += x[i][j] * x[i][j];
        }
        const float inverse = rsqrtf(
            group_sum(sum, 1 << params.group_shift) / static_cast<float>(p.head_dim) + p.eps);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (head.norm == nullptr || pieces[i] >= num_pieces) continue;
            float weight[kPiece];
            load_piece(weight, head.norm + pieces[i] * kPiece);
#pragma unroll
            for (int j = 0; j < kPiece; ++j) x[i][j] = x[i][j] * inverse * weight[j];
        }
    }
    if (!is_item || head.to == nullptr) return;
    if (head.is_rotated && p.num_pairs > 0) {
        const int64_t row = int64_t{p.position_ids[token]} * p.num_pairs;
        if (is_split) {
            float cos[kPiece], sin[kPiece];
            load_piece(cos, p.cos + row + own * kPiece);
            load_piece(sin, p.sin + row + own * kPiece);
#pragma unroll
            for (int j = 0; j < kPiece; ++j) turn(x[0][j], x[1][j], cos[j], sin[j]);
        } else if (p.is_interleaved) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (pieces[i] * kPiece >= 2 * p.num_pairs) continue;
#pragma unroll
                for (int j = 0; j < kPiece; j += 2) {
                    const int64_t at = row + (pieces[i] * kPiece + j) / 2;
                    turn(x[i][j], x[i][j + 1], p.cos[at], p.sin[at]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (pieces[i] < num_pieces) store_piece(head.to + pieces[i] * kPiece, x[i]);
    }
}

// A warp a head, any sizes: in shared memory, for a pair's features are far apart.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    any_head_kernel(const __grid_constant__ HeadParams params) {
    extern __shared__ float rows[];  // [warps][head_dim]
    const RotaryWriteKvParams& p = params.own;
    wait_for_prior_kernel();  // before the release: attention reads settled keys without a wait
    release_next_kernel();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const unsigned item = blockIdx.x * (kThreads / kWarpSize) + warp;
    if (item >= params.num_items) return;
    const unsigned token = item / params.heads;
    const Head<T> head(params, token, item - token * params.heads);
    if (head.to == nullptr) return;
    float* x = rows + int64_t{warp} * p.head_dim;
    float sum = 0.0f;
    for (int i = lane; i < p.head_dim; i += kWarpSize) {
        x[i] = static_cast<float>(head.from[i]);
        sum += x[i] * x[i];
    }
    if (head.norm != nullptr) {
        const float inverse =
            rsqrtf(group_sum(sum, kWarpSize) / static_cast<float>(p.head_dim) + p.eps);
        for (int i = lane; i < p.head_dim; i += kWarpSize) {
            x[i] *= inverse * static_cast<float>(head.norm[i]);
        }
    }
    __syncwarp();
    if (head.is_rotated) {
        const int64_t row = p.num_pairs > 0 ? int64_t{p.position_ids[token]} * p.num_pairs : 0;
        for (int i = lane; i < p.num_pairs; i += kWarpSize) {
            float* a = x + (p.is_interleaved ? 2 * i : i);
            turn(*a, a[p.is_interleaved ? 1 : p.num_pairs], p.cos[row + i], p.sin[row + i]);
        }
        __syncwarp();
    }
    for (int i = lane; i < p.head_dim; i += kWarpSize) head.to[i] = static_cast<T>(x[i]);
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
void launch_heads(const RotaryWriteKvParams& p, cudaStream_t stream) {
    const int64_t heads = p.num_heads + 2 * int64_t{p.num_kv_heads};
    int shift = 0;
    while (2 * kPiece << shift < p.head_dim) ++shift;
    const bool is_fast = is_aligned(p) && 1 << shift <= kWarpSize;
    const int64_t heads_at_once = kThreads / (is_fast ? 1 << shift : kWarpSize);
    if (p.total_tokens * heads * kWarpSize > std::numeric_limits<uint32_t>::max() - kThreads) {
        throw std::invalid_argument("rotary_write_kv: " + std::to_string(p.total_tokens) +
                                    " tokens are too many for one call");
    }
    const HeadParams params{p, static_cast<unsigned>(p.total_tokens * heads),
                            static_cast<unsigned>(heads), shift};
    const auto grid = static_cast<unsigned>((params.num_items + heads_at_once - 1) / heads_at_once);
    if (is_fast) return launch_kernel(head_kernel<T>, {grid, kThreads, 0, stream}, params);
    const int smem_bytes = kThreads / kWarpSize * p.head_dim * static_cast<int>(sizeof(float));
    allow_smem(any_head_kernel<T>, smem_bytes);
    launch_kernel(any_head_kernel<T>, {grid, kThreads, smem_bytes, stream}, params);
}

}  // namespace

void rotary_write_kv(const RotaryWriteKvParams& p, const Launch& launch) {
    if ((p.q_norm == nullptr) != (p.k_norm == nullptr) && p.num_kv_heads > 0 && p.num_heads > 0) {
        throw std::invalid_argument("rotary_write_kv needs q_norm and k_norm, or neither");
    }
    if (p.total_tokens == 0 || p.head_dim == 0 || p.num_heads + p.num_kv_heads == 0) return;
    const DeviceGuard guard(launch.device);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        launch_heads<T>(p, static_cast<cudaStream_t>(launch.stream));
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
    all.k = p.k;
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
