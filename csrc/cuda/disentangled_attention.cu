// Disentangled attention (DeBERTa) over packed sequences on Hopper, by mma.sync.
//
//   s(i, j) = q[i] . k[j] + q[i] . pos_k[b] + k[j] . pos_q[b],    b = buckets[i - j + span - 1]
//   out[i] = sum_j softmax_j(softmax_scale * s(i, j)) v[j]
//
// A CTA of four warps has 64 rows of one head of one sequence and walks over its keys, 64 at a
// time. b grows by 0 or 1 a step, so the distances of such a tile meet one run of at most 127 rows
// of pos_k and pos_q. The run lies in a ring of 128 rows of shared memory, row b at b % 128: the
// next 64 keys need at most 64 rows more, and the others stay.
//
//   a warp    q.k  [16 queries x 64 keys]      8 steps of eight columns
//             q.pos_k [16 queries x 79 distances]     10 steps, fewer where buckets are wide
//             k.pos_q [16 keys x 31 distances], four times   16 steps
//             p.v  [16 queries x head_dim]     8 steps
//
// so a tile costs 2.6 times the products of plain attention. Both position products go to shared
// memory of the warp's own in f32, and each score picks its two numbers from there. Scores, softmax
// and sums in f32; weights rounded to the element type for the second product.
//
// Bytes: q, k, v, out once each from DRAM; keys, values and runs (32 KB a step of 64 keys with 64
// features) from L2. Bound by issue slots: shared memory of the picks, then mma.sync. Numbers:
// docs/kernels/attention.md.
//
// Sources: DeBERTa (arXiv 2006.03654), section 3.1; FlashAttention-2 (arXiv 2307.08691) for the
// online softmax; the ring of buckets is our own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "cuda/attention_math.cuh"
#include "cuda/paged_mma.cuh"
#include "cuda/softmax_state.cuh"
#include "disentangled_ops.h"

namespace bytetx {
namespace {

using paged::copy_or_zero;
using paged::load_matrices;
using paged::piece_offset;

constexpr int kRows = 64;  // queries of a CTA, and keys of a step
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRing = 128;  // buckets in shared memory, at least 2 * kRows - 1, a power of two

// Buffers from which a warp picks q.pos_k and k.pos_q, f32. Strides by which the lanes of a pick
// fall on different banks, two at most on one.
constexpr int kContentStride = 88;   // 16 queries x 80 buckets
constexpr int kPositionStride = 37;  // 16 keys x 32 buckets
constexpr int kPickWords = 16 * kContentStride + 16 * kPositionStride;

template <int kDim>
struct Shared {
    static constexpr int kTileBytes = kRows * kDim * 2;
    static constexpr int kRingBytes = kRing * kDim * 2;
    static constexpr int kQ = 0;
    static constexpr int kK = kTileBytes;
    static constexpr int kV = 2 * kTileBytes;
    static constexpr int kPosK = 3 * kTileBytes;
    static constexpr int kPosQ = kPosK + kRingBytes;
    static constexpr int kPicks = kPosQ + kRingBytes;
    static constexpr int kBytes = kPicks + kWarps * kPickWords * 4;
};

struct Tile {
    int begin;   // first token of the sequence
    int seqlen;  // 0: there is no such tile
    int row;     // first query, position in the sequence
};

// Sequence s has the tiles from cu_seqlens[s] / kRows + s on: enough of them, for rounding loses at
// most one, and found without a table.
__device__ __forceinline__ Tile find_tile(const DisentangledAttentionParams& p, int index) {
    int low = 0, high = static_cast<int>(p.batch_size);  // the last s whose first tile is <= index
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (p.cu_seqlens[middle] / kRows + middle <= index ? low : high) = middle;
    }
    const int begin = p.cu_seqlens[low];
    const int seqlen = p.cu_seqlens[low + 1] - begin;
    const int row = (index - begin / kRows - low) * kRows;
    return {begin, row < seqlen ? seqlen : 0, row};
}

__device__ __forceinline__ int bucket_of(const DisentangledAttentionParams& p, int distance) {
    const int clamped = min(max(distance, 1 - p.span), p.span - 1);
    return min(max(__ldg(p.buckets + clamped + p.span - 1), 0), p.num_buckets - 1);
}

// 64 rows of a head from `row` of the sequence on; rows past its end and features past head_dim are
// zeros.
template <int kDim>
__device__ __forceinline__ void load_rows(const DisentangledAttentionParams& p, uint32_t to,
                                          const void* rows, int64_t stride, const Tile& tile,
                                          int row, int head) {
    constexpr int kPieces = kDim / 8;
    const auto* from = static_cast<const uint16_t*>(rows) + int64_t{head} * p.head_dim;
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
        const int r = i / kPieces, piece = i % kPieces;
        const bool is_there = row + r < tile.seqlen && piece * 8 < p.head_dim;
        const int64_t token = tile.begin + (is_there ? row + r : 0);
        copy_or_zero(to + piece_offset<kDim>(r, piece),
                     from + token * stride + (is_there ? piece * 8 : 0), is_there ? 16 : 0);
    }
}

// Buckets first .. last of pos_k or pos_q into the ring.
template <int kDim>
__device__ __forceinline__ void load_buckets(const DisentangledAttentionParams& p, uint32_t to,
                                             const void* table, int first, int last, int head) {
    if (table == nullptr) return;
    constexpr int kPieces = kDim / 8;
    const auto* from = static_cast<const uint16_t*>(table) + int64_t{head} * p.head_dim;
    for (int i = threadIdx.x; i < (last - first + 1) * kPieces; i += kThreads) {
        const int bucket = first + i / kPieces, piece = i % kPieces;
        const bool is_there = piece * 8 < p.head_dim;
        const int64_t row = int64_t{bucket} * p.num_heads * p.head_dim;
        copy_or_zero(to + piece_offset<kDim>(bucket & (kRing - 1), piece),
                     from + row + (is_there ? piece * 8 : 0), is_there ? 16 : 0);
    }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
    __syncthreads();
}

// The A operand of 16 rows and 16 features, from row and piece (of eight features) on.
template <int kDim>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, int row, int piece,
                                       int lane) {
    load_matrices<false>(a, tile + piece_offset<kDim>(row + lane % 16, piece + lane / 16));
}

// c += a b^T for 16 rows of a and eight rows of b, `row(r)` where row r of them lies.
template <typename T, int kDim, typename Row>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[kDim / 16][4],
                                         uint32_t b, int lane, Row&& row) {
#pragma unroll
    for (int step = 0; step < kDim / 16; step += 2) {
        uint32_t rows[4];  // eight features each
        load_matrices<false>(rows, b + piece_offset<kDim>(row(lane % 8), 2 * step + lane / 8));
        mma<T>(c, a[step], rows[0], rows[1]);
        mma<T>(c, a[step + 1], rows[2], rows[3]);
    }
}

// picks[r][c] = a[r] . ring[first + c], for 16 rows and num_buckets columns, rounded up to eight.
template <typename T, int kDim, int kMaxSteps>
__device__ __forceinline__ void multiply_buckets(float* picks, int stride,
                                                 const uint32_t (&a)[kDim / 16][4], uint32_t ring,
                                                 int first, int num_buckets, int lane) {
#pragma unroll
    for (int n = 0; n < kMaxSteps; ++n) {
        if (8 * n >= num_buckets) break;
        float c[4] = {};
        multiply<T, kDim>(c, a, ring, lane,
                          [&](int row) { return (first + 8 * n + row) & (kRing - 1); });
        float* to = picks + (lane / 4) * stride + 8 * n + 2 * (lane % 4);
        to[0] = c[0];
        to[1] = c[1];
        to[8 * stride] = c[2];
        to[8 * stride + 1] = c[3];
    }
}

// Calls each(i, half, key, distance) for the 32 scores of a thread: element i of its accumulators,
// row 8 * half of its rows, key of the step. first: i - j of the warp's row 0 and the step's key 0.
template <typename Each>
__device__ __forceinline__ void for_scores(int first, int lane, int begin, int end, Each&& each) {
#pragma unroll
    for (int n = begin; n < end; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = 8 * n + 2 * (lane % 4) + e % 2;
            each(4 * n + e, e / 2, key, first + lane / 4 + 8 * (e / 2) - key);
        }
    }
}

// Four warps' work on 64 rows of a head; see the head of this file.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim <= 64 ? 2 : 1)
    disentangled_kernel(const __grid_constant__ DisentangledAttentionParams p) {
    using S = Shared<kDim>;
    constexpr int kSteps = kDim / 16;
    extern __shared__ __align__(128) unsigned char shared[];
    release_next_kernel();
    wait_for_prior_kernel();
    const Tile tile = find_tile(p, blockIdx.x);
    if (tile.seqlen == 0) return;
    const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    float* content = reinterpret_cast<float*>(shared + S::kPicks) + warp * kPickWords;
    float* position = content + 16 * kContentStride;

    const auto load_keys = [&](int key, int last_loaded) {
        load_rows<kDim>(p, base + S::kK, p.k, p.k_stride, tile, key, head);
        if (p.buckets == nullptr) return 0;
        const int first = bucket_of(p, tile.row - key - (kRows - 1));
        const int last = min(bucket_of(p, tile.row - key + (kRows - 1)), last_loaded);
        load_buckets<kDim>(p, base + S::kPosK, p.pos_k, first, last, head);
        load_buckets<kDim>(p, base + S::kPosQ, p.pos_q, first, last, head);
        return first;
    };
    load_rows<kDim>(p, base + S::kQ, p.q, p.q_stride, tile, tile.row, head);
    int first_bucket = load_keys(0, p.num_buckets - 1);  // lowest bucket in the ring
    commit_copies();

    uint32_t q[kSteps][4];
    float out[kDim / 8][4] = {};
    SoftmaxState state[2] = {{kNoMax, 0.0f}, {kNoMax, 0.0f}};
    const float scale = p.softmax_scale * kLog2e;

    for (int key = 0; key < tile.seqlen; key += kRows) {
        wait_for_copies<0>();  // q, k and the ring; v of the step before is free
        load_rows<kDim>(p, base + S::kV, p.v, p.v_stride, tile, key, head);
        commit_copies();
        if (key == 0) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                load_a<kDim>(q[step], base + S::kQ, 16 * warp, 2 * step, lane);
            }
        }
        float scores[kRows / 8][4];
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f;
            multiply<T, kDim>(scores[n], q, base + S::kK, lane,
                              [&](int row) { return 8 * n + row; });
        }
        auto* flat = &scores[0][0];
        const int distance = tile.row + 16 * warp - key;  // distance of the warp's row 0 and key 0
        if (p.pos_k != nullptr) {
            const int first = bucket_of(p, distance - (kRows - 1));
            const int last = bucket_of(p, distance + 15);
            multiply_buckets<T, kDim, 10>(content, kContentStride, q, base + S::kPosK, first,
                                          last - first + 1, lane);
            __syncwarp();
            const float* own = content + (lane / 4) * kContentStride;
            if (last - first == kRows - 1 + 15) {  // every distance is a bucket
                for_scores(distance, lane, 0, kRows / 8, [&](int i, int half, int, int d) {
                    flat[i] += own[8 * half * kContentStride + d - (distance - (kRows - 1))];
                });
            } else {
                for_scores(distance, lane, 0, kRows / 8, [&](int i, int half, int, int d) {
                    flat[i] += own[8 * half * kContentStride + bucket_of(p, d) - first];
                });
            }
        }
        if (p.pos_q != nullptr) {
#pragma unroll
            for (int group = 0; group < kRows / 16; ++group) {
                uint32_t k[kSteps][4];
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    load_a<kDim>(k[step], base + S::kK, 16 * group, 2 * step, lane);
                }
                const int nearest = distance - 16 * group - 15;
                const int first = bucket_of(p, nearest);
                const int last = bucket_of(p, nearest + 30);
                __syncwarp();
                multiply_buckets<T, kDim, 4>(position, kPositionStride, k, base + S::kPosQ, first,
                                             last - first + 1, lane);
                __syncwarp();
                const float* own = position - 16 * group * kPositionStride;
                if (last - first == 30) {
                    for_scores(distance, lane, 2 * group, 2 * group + 2,
                               [&](int i, int, int j, int d) {
                                   flat[i] += own[j * kPositionStride + d - nearest];
                               });
                } else {
                    for_scores(distance, lane, 2 * group, 2 * group + 2,
                               [&](int i, int, int j, int d) {
                                   flat[i] += own[j * kPositionStride + bucket_of(p, d) - first];
                               });
                }
            }
        }
        __syncthreads();  // k and the ring are free
        if (key + kRows < tile.seqlen) first_bucket = load_keys(key + kRows, first_bucket - 1);
        commit_copies();

#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float maximum = state[half].max;
            for_scores(distance, lane, 0, kRows / 8, [&](int i, int own_half, int j, int) {
                if (own_half != half) return;
                flat[i] = key + j < tile.seqlen ? flat[i] * scale : kNoMax;
                maximum = fmaxf(maximum, flat[i]);
            });
            maximum = quad_max(maximum);
            const float factor = state[half].raise(maximum);
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) {
                out[n][2 * half] *= factor;
                out[n][2 * half + 1] *= factor;
            }
            for_scores(distance, lane, 0, kRows / 8, [&](int i, int own_half, int, int) {
                if (own_half != half) return;
                flat[i] = state[half].weight(flat[i]);
                state[half].sum += flat[i];
            });
        }
        wait_for_copies<1>();  // v
#pragma unroll
        for (int step = 0; step < kRows / 16; ++step) {
            uint32_t weights[4];  // the accumulators' registers are the A operand's, pair by pair
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &scores[2 * step + i / 2][2 * (i % 2)];
                weights[i] = pack_pair<T>(pair[0], pair[1]);
            }
#pragma unroll
            for (int n = 0; n < kDim / 8; n += 2) {
                uint32_t v[4];
                load_matrices<true>(
                    v, base + S::kV + piece_offset<kDim>(16 * step + lane % 16, n + lane / 16));
                mma<T>(out[n], weights, v[0], v[1]);
                mma<T>(out[n + 1], weights, v[2], v[3]);
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = tile.row + 16 * warp + lane / 4 + 8 * half;
        const float divisor = reciprocal_approx(quad_sum(state[half].sum));
        if (row >= tile.seqlen) continue;
        auto* to = static_cast<uint16_t*>(p.out) + (int64_t{tile.begin} + row) * p.out_stride +
                   int64_t{head} * p.head_dim;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            const int column = 8 * n + 2 * (lane % 4);
            if (8 * n >= p.head_dim) break;
            *reinterpret_cast<uint32_t*>(to + column) =
                pack_pair<T>(out[n][2 * half] * divisor, out[n][2 * half + 1] * divisor);
        }
    }
}

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

void check(const DisentangledAttentionParams& p) {
    const auto fail = [](const std::string& what) {
        throw std::invalid_argument("disentangled_attention needs " + what);
    };
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) fail("f16 or bf16");
    if (p.head_dim <= 0 || p.head_dim > 128 || p.head_dim % 8 != 0) {
        fail("head_dim a multiple of 8 up to 128, got " + std::to_string(p.head_dim));
    }
    for (const int64_t stride : {p.q_stride, p.k_stride, p.v_stride, p.out_stride}) {
        if (stride % 8 != 0) {
            fail("row strides that are multiples of 8, got " + std::to_string(stride));
        }
    }
    for (const void* address : {p.q, p.k, p.v, p.pos_k, p.pos_q, (const void*)p.out}) {
        if (!is_aligned(address)) fail("16-byte aligned addresses");
    }
    if (!(p.softmax_scale > 0.0f)) {
        fail("softmax_scale > 0, got " + std::to_string(p.softmax_scale));
    }
    const bool has_buckets = p.pos_k != nullptr || p.pos_q != nullptr;
    if (has_buckets && (p.buckets == nullptr || p.span < 1 || p.num_buckets < 1)) {
        fail("buckets with pos_k and pos_q");
    }
}

}  // namespace

void disentangled_attention(const DisentangledAttentionParams& p, const Launch& launch) {
    check(p);
    if (p.total_tokens == 0 || p.batch_size == 0) return;
    const DeviceGuard guard(launch.device);
    DisentangledAttentionParams own = p;
    if (p.pos_k == nullptr && p.pos_q == nullptr) own.buckets = nullptr;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(p.total_tokens / kRows + p.batch_size),
                      static_cast<unsigned>(p.num_heads));
    shape.block = dim3(kThreads);
    shape.stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_at_least<64, 128>(p.head_dim, [&]<int kDim>() {
        shape.smem_bytes = Shared<kDim>::kBytes;
        if (p.dtype == DType::f16) {
            allow_smem_once<&disentangled_kernel<__half, kDim>>(shape.smem_bytes);
            launch_kernel(disentangled_kernel<__half, kDim>, shape, own);
        } else {
            allow_smem_once<&disentangled_kernel<__nv_bfloat16, kDim>>(shape.smem_bytes);
            launch_kernel(disentangled_kernel<__nv_bfloat16, kDim>, shape, own);
        }
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
