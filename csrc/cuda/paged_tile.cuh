// The arithmetic of prefill tiles: what one warpgroup does with 64 rows and a step of keys, by
// wgmma.
//
// Rows of a tile are in the order of their last visible key, so the first and the last row of a
// warp tell which keys all of its rows see, and which keys any row sees. As in attention_rows.cuh,
// but for keys of one sequence, and every step computes the maximum, because no row is computed
// again here.
#pragma once

#include "cuda/attention_mma.cuh"
#include "cuda/paged_mma.cuh"

namespace bytetx::paged {

template <typename T, int kHeadDim, typename Tiling>
struct PrefillTypes : TileShapes<T, kHeadDim, Tiling::kBlockN> {
    static constexpr int kStages = Tiling::kStages;
    static constexpr int kNumWarpgroups = Tiling::kNumWarpgroups;
    static constexpr int kQStages = Tiling::kQStages;
    static constexpr int kConsumerRegisters = Tiling::kConsumerRegisters;
    static constexpr int kGatherRegisters = Tiling::kGatherRegisters;
};

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

// One warpgroup's 64 rows of one key head.
template <typename C>
struct RowTile {
    using T = typename C::Element;
    using AccO = decltype(cute::partition_fragment_C(
        typename C::template MmaPv<C::kBlockN>{},
        cute::Shape<cute::Int<kTileRows>, cute::Int<C::kDim>>{}));
    int tid;  // in the warpgroup
    int lane;
    int base;                  // first row of the tile's
    int num_rows;              // from there to the tile's end
    int2 bounds[2];            // keys of the thread's two rows
    int warp_begin, warp_end;  // keys that any row of the warp sees
    int full_begin, full_end;  // keys that every row of the warp sees
    float scale;               // score to power of two
    float row_max[2];          // the scaled score that the weights are relative to
    float sum[2];              // of this thread's weights
    AccO out;
    bool is_fresh;  // nothing is in out yet

    __device__ __forceinline__ int row(int half) const {
        return base + tid / 32 * 16 + lane / 4 + 8 * half;
    }

    // out += softmax weights of keys first .. first + kN - 1, times their values. on_scores is
    // called with them when k is free, wait_v when the values are needed; v is free on return.
    template <int kN, typename OnScores, typename WaitV>
    __device__ __forceinline__ void attend(const T* q, const T* k, const T* v, int first,
                                           OnScores&& on_scores, WaitV&& wait_v) {
        auto scores = multiply_qk<kN>(q, k);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(scores);
        on_scores(scores);
        if (first >= full_begin && first + kN <= full_end) {
            softmax<kN, false>(scores, first);
        } else {
            softmax<kN, true>(scores, first);
        }
        uint32_t weights[kN / 4];  // the accumulator's registers are the A operand's, pair by pair
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) weights[i / 2] = pack_pair<T>(scores(i), scores(i + 1));
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

    // Scores become weights 2^(score - row_max); sums and, where row_max is raised, out follow.
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
                scores(i) = exp2_approx(fmaf(scores(i), scale, -row_max[half]));
                sum[half] += scores(i);
            }
        }
    }

    // A row's own scores decide, never its neighbours': the vote only skips work that changes
    // nothing.
    __device__ __forceinline__ void raise_top(float largest0, float largest1) {
        const bool raise[2] = {largest0 > row_max[0] + kMaxSlack,
                               largest1 > row_max[1] + kMaxSlack};
        if (!__any_sync(kFullMask, raise[0] || raise[1])) return;
        const float next[2] = {raise[0] ? largest0 : row_max[0], raise[1] ? largest1 : row_max[1]};
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factor[half] = exp2_approx(row_max[half] - next[half]);
            sum[half] *= factor[half];
            row_max[half] = next[half];
        }
        if (is_fresh) return;
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) out(i) *= factor[(i / 2) % 2];
    }
};

}  // namespace bytetx::paged
