// What both attention kernels share: how a tile lies in shared memory, and what one warpgroup does
// with its 64 query rows: scores, masked softmax, the weighted sum of values, the store.
//
// A tile is 64 consecutive token rows of one head and takes no notice of where sequences begin. Its
// keys are one run of rows, from the first key of its first row to the last key of its last row;
// bounds grow with the row, so [begin, end) of a row, warp or warpgroup comes from its end rows.
//
//   rows of the tile   keys  0 1 2 3 4 5 6 7
//   sequence A  0            x x x . . . . .      x  score of the row's own sequence
//               1            x x x . . . . .      .  computed by the matrix unit, then masked
//               2            x x x . . . . .
//   sequence B  3            . . . x x x x x
//
// Registers of a thread (wgmma's accumulator layout): rows r0 = 16 * warp + lane / 4 and r0 + 8,
// columns 8 * j + 2 * (lane % 4) + {0, 1}: element 4 * j + e is row r0, 4 * j + 2 + e is row r0
// + 8.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/ring.cuh"

namespace bytetx::attention {

constexpr int kTileRows = 64;      // rows of one wgmma
constexpr int kChunkColumns = 16;  // columns that a warp skips together: one step of P V
constexpr int kElementBytes = 2;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
// A row's running maximum is raised only when a score exceeds it by this much (in powers of two):
// weights stay at most 2^8, exact in f16 as they are at 1, and most rescales disappear.
// Source: FlashAttention-4's conditional rescaling.
constexpr float kMaxSlack = 8.0f;
constexpr float kNoMax = -3.0e38f;  // below every score, and finite: -inf - (-inf) would be NaN

// What a kernel gets. TMA maps first: they must be 64-byte aligned.
struct Params {
    CUtensorMap q;  // {head_dim, num_heads, total_tokens}
    CUtensorMap k;
    CUtensorMap v;
    const void* k_rows;  // for recompute_row alone
    const void* v_rows;
    const void* q_rows;
    void* out;
    const int2* row_bounds;  // [num_tiles * rows of a tile] its sequence; {total, total} past it
    const int4* tiles;       // [num_tiles] {first row, rows, first key, one past the last key}
    const int* used_tiles;   // how many of them hold rows
    const float* relative_bias;                        // [num_heads, 2 * span - 1], or null
    const int* bias_positions;                         // [total_tokens], or null
    int64_t q_stride, k_stride, v_stride, out_stride;  // elements
    int total_tokens;
    int num_tiles;
    int num_heads;
    int group;  // query heads per key head
    int head_dim;
    int window;  // keys a row sees up to itself; 0: no limit
    int bias_span;
    bool causal;
    float softmax_scale;
};

template <typename T, int kHeadDim, typename Tiling>
struct TileTypes {
    using Element = T;
    static constexpr int kDim = kHeadDim;
    static constexpr int kBlockN = Tiling::kBlockN;
    static constexpr int kStages = Tiling::kStages;
    static constexpr int kNumWarpgroups = Tiling::kNumWarpgroups;
    static constexpr int kQStages = Tiling::kQStages;
    static constexpr int kConsumerRegisters = Tiling::kConsumerRegisters;
    static constexpr int kProducerRegisters = 24;
    // Registers move between warpgroups only: without a move the producer is a single warp.
    static constexpr int kProducerThreads = kConsumerRegisters > 0 ? 128 : 32;
    static constexpr bool kHasBias = Tiling::kHasBias;
    // Columns of one TMA box: a swizzled row is at most 128 bytes.
    static constexpr int kBoxColumns = kHeadDim % 64 == 0 ? 64 : 32;
    static constexpr int kQElements = kTileRows * kHeadDim;
    static constexpr int kKvElements = kBlockN * kHeadDim;
    static constexpr int kKvBytes = kKvElements * kElementBytes;
    using Atom = std::conditional_t<kBoxColumns == 64, cute::GMMA::Layout_K_SW128_Atom<T>,
                                    cute::GMMA::Layout_K_SW64_Atom<T>>;
    using LayoutQ = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kTileRows>, cute::Int<kHeadDim>>{}));
    using LayoutK = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>{}));
    using LayoutVt = decltype(cute::composition(
        LayoutK{}, cute::make_layout(cute::Shape<cute::Int<kHeadDim>, cute::Int<kBlockN>>{},
                                     cute::Stride<cute::Int<kBlockN>, cute::_1>{})));
    template <int kN>
    using MmaQk = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kHeadDim>>>()));
    template <int kN>
    using MmaPv = decltype(cute::make_tiled_mma(
        cute::GMMA::rs_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kHeadDim>, cute::Int<kN>>,
                                   cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
};

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Copies kRows token rows of one head to a swizzled tile, box by box; rows and columns that the
// tensor does not have arrive as zeros and count as bytes.
template <typename C, int kRows>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, uint64_t* barrier,
                                          typename C::Element* tile, int head, int row) {
#pragma unroll
    for (int box = 0; box < C::kDim / C::kBoxColumns; ++box) {
        cute::SM90_TMA_LOAD_3D::copy(
            &map, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
            tile + box * kRows * C::kBoxColumns, box * C::kBoxColumns, head, row);
    }
}

// 2^x to 2 ulp, subnormal results flushed: the weights are rounded to 11 bits right after.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The keys that `row` sees, of its sequence [bounds.x, bounds.y).
__device__ __forceinline__ int2 key_bounds(const Params& p, int2 bounds, int row) {
    if (p.causal) bounds.y = min(bounds.y, row + 1);
    if (p.window > 0) bounds.x = max(bounds.x, min(bounds.y, row + 1 - p.window));
    return bounds;
}

// Position of a token for the relative bias; any token: neighbours of the batch are clamped.
__device__ __forceinline__ int bias_position(const Params& p, int token) {
    return p.bias_positions ? p.bias_positions[min(max(token, 0), p.total_tokens - 1)] : token;
}

// Bit t is set where thread column t (2 * j + e stands for column 8 * j + e) is in [begin, end).
__device__ __forceinline__ unsigned column_bits(int begin, int end) {
    const auto below = [](int column) {
        const int count = 2 * (max(column, 0) / 8) + min(max(column, 0) % 8, 2);
        unsigned bits;  // PTX shifts clamp: 32 and more give 0
        asm("shl.b32 %0, %1, %2;" : "=r"(bits) : "r"(~0u), "r"(count));
        return ~bits;
    };
    return below(end) & ~below(begin);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullMask, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFullMask, x, 1);
    return x + __shfl_xor_sync(kFullMask, x, 2);
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    const cutlass::NumericArrayConverter<T, float, 2> convert;
    const auto pair = convert(cutlass::Array<float, 2>{low, high});
    return reinterpret_cast<const uint32_t&>(pair);
}

// One warpgroup's 64 rows of one head.
template <typename C>
struct RowTile {
    using T = typename C::Element;
    using AccO = decltype(cute::partition_fragment_C(
        typename C::template MmaPv<C::kBlockN>{},
        cute::Shape<cute::Int<kTileRows>, cute::Int<C::kDim>>{}));
    const Params& p;
    int tid;  // in the warpgroup
    int lane;
    int base;  // first row
    int head;
    int num_rows;              // of the 64: the others belong to other tiles, or to nobody
    int2 bounds[2];            // keys of the thread's two rows
    int warp_begin, warp_end;  // keys that any row of the warp sees
    int full_begin, full_end;  // keys that every row of the warp sees
    float scale;               // score to power of two
    float top[2];              // the scaled score that the weights are relative to
    float sum[2];              // of this thread's weights
    AccO out;
    bool is_fresh;  // nothing is in out yet

    __device__ __forceinline__ int row(int half) const {
        return base + (tid / 32) * 16 + lane / 4 + 8 * half;
    }

    // sequences: row_bounds of the warpgroup's 64 rows, in global or shared memory. last_key: one
    // past the keys of the tile; rows of other tiles see no key from there.
    __device__ __forceinline__ void start(const int2* sequences, int first_row, int rows,
                                          int of_head, int last_key) {
        base = first_row;
        head = of_head;
        num_rows = rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = row(half) - base;
            bounds[half] = local < rows ? key_bounds(p, sequences[local], row(half))
                                        : make_int2(last_key, last_key);
            top[half] = kNoMax;
            sum[half] = 0.0f;
        }
        warp_begin = __shfl_sync(kFullMask, bounds[0].x, 0);
        full_end = __shfl_sync(kFullMask, bounds[0].y, 0);
        full_begin = __shfl_sync(kFullMask, bounds[1].x, 31);
        warp_end = __shfl_sync(kFullMask, bounds[1].y, 31);
        scale = C::kHasBias ? 1.0f : p.softmax_scale * kLog2e;
        is_fresh = true;
    }

    // The keys that any of the 64 rows sees: for tiles of several warpgroups, which skip by it.
    __device__ __forceinline__ int2 own_keys(const int2* sequences) const {
        if (num_rows <= 0) return {0, 0};
        const int last = min(num_rows, kTileRows) - 1;
        return {uniform(key_bounds(p, sequences[0], base).x),
                uniform(key_bounds(p, sequences[last], base + last).y)};
    }

    // out += softmax weights of keys first .. first + kN - 1, times their values. on_scores is
    // called when k is free, wait_v when the values are needed; v is free on return.
    template <int kN, typename OnScores, typename WaitV>
    __device__ __forceinline__ void attend(const T* q, const T* k, const T* v, int first,
                                           OnScores&& on_scores, WaitV&& wait_v) {
        auto scores = multiply_qk<kN>(q, k);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(scores);
        on_scores();
        if constexpr (C::kHasBias) add_bias<kN>(scores, first);
        if (first >= full_begin && first + kN <= full_end) {
            softmax<kN, false>(scores, first);
        } else {
            softmax<kN, true>(scores, first);
        }
        uint32_t weights[kN / 4];  // the accumulator's registers are the A operand's, pair by pair
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) weights[i / 2] = pack<T>(scores(i), scores(i + 1));
        wait_v();
        multiply_pv<kN>(weights, v);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(out);
    }

    template <int kN>
    __device__ __forceinline__ auto multiply_qk(const T* q, const T* k) {
        using namespace cute;
        typename C::template MmaQk<kN> mma;
        auto thread = mma.get_thread_slice(tid);
        Tensor q_tile = make_tensor(make_smem_ptr(q), typename C::LayoutQ{});
        Tensor k_tile = local_tile(make_tensor(make_smem_ptr(k), typename C::LayoutK{}),
                                   Shape<Int<kN>, Int<C::kDim>>{}, make_coord(_0{}, _0{}));
        Tensor a = thread.partition_fragment_A(q_tile);
        Tensor b = thread.partition_fragment_B(k_tile);
        Tensor acc = partition_fragment_C(mma, Shape<Int<kTileRows>, Int<kN>>{});
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        warpgroup_fence_operand(acc);
        warpgroup_arrive();
        CUTE_UNROLL
        for (int step = 0; step < size<2>(a); ++step) {
            cute::gemm(mma, a(_, _, step), b(_, _, step), acc);
            mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        return acc;
    }

    template <int kN>
    __device__ __forceinline__ void multiply_pv(const uint32_t (&weights)[kN / 4], const T* v) {
        using namespace cute;
        typename C::template MmaPv<kN> mma;
        auto thread = mma.get_thread_slice(tid);
        Tensor v_tile = local_tile(make_tensor(make_smem_ptr(v), typename C::LayoutVt{}),
                                   Shape<Int<C::kDim>, Int<kN>>{}, make_coord(_0{}, _0{}));
        Tensor b = thread.partition_fragment_B(v_tile);
        auto layout =
            thread.partition_fragment_A(make_tensor<T>(Shape<Int<kTileRows>, Int<kN>>{})).layout();
        Tensor a = make_tensor(reinterpret_cast<const T*>(weights), layout);
        mma.accumulate_ = is_fresh ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        warpgroup_fence_operand(out);
        warpgroup_arrive();
        CUTE_UNROLL
        for (int step = 0; step < size<2>(a); ++step) {
            cute::gemm(mma, a(_, _, step), b(_, _, step), out);
            mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        is_fresh = false;
    }

    // Scores become scaled scores plus bias, in powers of two. Keys outside the row's sequence have
    // no distance: their index is clamped and their score is masked right after.
    template <int kN, typename Scores>
    __device__ __forceinline__ void add_bias(Scores& scores, int first) {
        const float* table = p.relative_bias + int64_t{head} * (2 * p.bias_span - 1);
        const int zero[2] = {p.bias_span - 1 - bias_position(p, row(0)),
                             p.bias_span - 1 - bias_position(p, row(1))};
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            const int key = first + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            const int distance = bias_position(p, key) + zero[(i / 2) % 2];
            const int index = min(max(distance, 0), 2 * p.bias_span - 2);
            scores(i) = (scores(i) * p.softmax_scale + table[index]) * kLog2e;
        }
    }

    // Scores become weights 2^(score - top); sums and, where top is raised, out follow.
    // Chunks of 16 keys that no row of the warp sees cost nothing but their zeros.
    template <int kN, bool kMasked, typename Scores>
    __device__ __forceinline__ void softmax(Scores& scores, int first) {
        const auto is_live = [&](int i) {
            const int column = first + i / 8 * kChunkColumns;
            return !kMasked || (column < warp_end && column + kChunkColumns > warp_begin);
        };
        unsigned bits[2];
        if constexpr (kMasked) {
            const int column = first + 2 * (lane % 4);
            bits[0] = column_bits(bounds[0].x - column, bounds[0].y - column);
            bits[1] = column_bits(bounds[1].x - column, bounds[1].y - column);
        }
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int chunk = 0; chunk < kN / 2; chunk += 8) {
            if (!is_live(chunk)) continue;
#pragma unroll
            for (int i = chunk; i < chunk + 8; ++i) {
                const int half = (i / 2) % 2;
                if constexpr (kMasked) {
                    if (!(bits[half] >> (2 * (i / 4) + i % 2) & 1)) scores(i) = -INFINITY;
                }
                largest[half] = fmaxf(largest[half], scores(i));
            }
        }
        raise_top(quad_max(largest[0]) * scale, quad_max(largest[1]) * scale);
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
                scores(i) = exp2_approx(fmaf(scores(i), scale, -top[half]));
                sum[half] += scores(i);
            }
        }
    }

    // A row's own scores decide, never its neighbours': the vote only skips work that changes
    // nothing.
    __device__ __forceinline__ void raise_top(float largest0, float largest1) {
        const bool raise[2] = {largest0 > top[0] + kMaxSlack, largest1 > top[1] + kMaxSlack};
        if (!__any_sync(kFullMask, raise[0] || raise[1])) return;
        const float next[2] = {raise[0] ? largest0 : top[0], raise[1] ? largest1 : top[1]};
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factor[half] = exp2_approx(top[half] - next[half]);
            sum[half] *= factor[half];
            top[half] = next[half];
        }
        if (is_fresh) return;
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) out(i) *= factor[(i / 2) % 2];
    }
};

}  // namespace bytetx::attention
