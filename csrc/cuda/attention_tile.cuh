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

#include "common/ring.cuh"
#include "cuda/attention_types.cuh"

namespace bytetx::attention {

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

// Makes the start of a tile in shared memory, the same in every lane, known as such: from there on
// the descriptors of its parts are sums of uniform registers. Otherwise the compiler moves each of
// them, a quarter of a step's work.
template <typename Descriptors>
__device__ __forceinline__ auto known_uniform(const Descriptors& tile) {
    auto start = tile.data();
    start.desc_.reg32_[0] = uniform(static_cast<int>(start.desc_.reg32_[0]));
    return cute::make_tensor(start, tile.layout());
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
    int full_begin, full_end;  // keys that every row of the warp sees
    float top[2];              // the scaled score that the weights are relative to
    float sum[2];              // of this thread's weights
    AccO out;

    __device__ __forceinline__ int row(int half) const {
        return base + (tid / 32) * 16 + lane / 4 + 8 * half;
    }

    // From a score to a power of two; a constant costs no register.
    __device__ __forceinline__ float scale() const {
        return C::kHasBias ? 1.0f : p.power_scale;
    }

    // sequences: row_bounds of the warpgroup's 64 rows, in global or shared memory. last_key: one
    // past the keys of the tile; rows of other tiles see no key from there.
    __device__ __forceinline__ void start(const int2* sequences, int last_key) {
        find_bounds(sequences, last_key);
        top[0] = top[1] = kNoMax;
        sum[0] = sum[1] = 0.0f;
        cute::clear(out);
    }

    __device__ __forceinline__ void find_bounds(const int2* sequences, int last_key) {
        // Rows past the end see what the last one sees, for a warp whose rows all see a step masks
        // nothing; they are not stored. Warps without any row see no key.
        const bool is_used = tid / 32 * 16 < num_rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = min(row(half) - base, num_rows - 1);
            bounds[half] = is_used ? key_bounds(p, sequences[local], base + local)
                                   : make_int2(last_key, last_key);
        }
        full_end = __shfl_sync(kFullMask, bounds[0].y, 0);
        full_begin = __shfl_sync(kFullMask, bounds[1].x, 31);
    }

    // out += softmax weights of keys first .. first + kN - 1, times their values. find is called
    // where bounds are needed, wait_v when the values are; k and v are free on return.
    template <int kN, typename Find, typename WaitV>
    __device__ __forceinline__ void attend(const T* q, const T* k, const T* v, int first,
                                           Find&& find, WaitV&& wait_v) {
        auto scores = multiply_qk<kN>(q, k);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(scores);
        if constexpr (C::kHasBias) add_bias<kN>(scores, first);
        float factor[2];
        if (weigh<kN>(scores, first, factor, find)) rescale(factor);
        uint32_t weights[kN / 4];
        pack_weights<kN>(weights, scores);
        wait_v();
        multiply_pv<kN>(weights, v);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(out);
    }

    // Whether every row of the warp sees every one of the keys first .. first + kN - 1.
    template <int kN>
    __device__ __forceinline__ bool sees_all(int first) const {
        return first >= full_begin && first + kN <= full_end;
    }

    // The accumulator's registers are the A operand's, pair by pair.
    template <int kN, typename Scores>
    __device__ __forceinline__ void pack_weights(uint32_t* weights, const Scores& scores) {
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) weights[i / 2] = pack<T>(scores(i), scores(i + 1));
    }

    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) out(i) *= factor[(i / 2) % 2];
    }

    template <int kN>
    __device__ __forceinline__ auto multiply_qk(const T* q, const T* k) {
        using namespace cute;
        typename C::template MmaQk<kN> mma;
        auto thread = mma.get_thread_slice(tid);
        Tensor q_tile = make_tensor(make_smem_ptr(q), typename C::LayoutQ{});
        Tensor k_tile = local_tile(make_tensor(make_smem_ptr(k), typename C::LayoutK{}),
                                   Shape<Int<kN>, Int<C::kDim>>{}, make_coord(_0{}, _0{}));
        Tensor a = known_uniform(thread.partition_fragment_A(q_tile));
        Tensor b = known_uniform(thread.partition_fragment_B(k_tile));
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
    __device__ __forceinline__ void multiply_pv(const uint32_t* weights, const T* v) {
        using namespace cute;
        typename C::template MmaPv<kN> mma;
        auto thread = mma.get_thread_slice(tid);
        Tensor v_tile = local_tile(make_tensor(make_smem_ptr(v), typename C::LayoutVt{}),
                                   Shape<Int<C::kDim>, Int<kN>>{}, make_coord(_0{}, _0{}));
        Tensor b = known_uniform(thread.partition_fragment_B(v_tile));
        auto layout =
            thread.partition_fragment_A(make_tensor<T>(Shape<Int<kTileRows>, Int<kN>>{})).layout();
        Tensor a = make_tensor(reinterpret_cast<const T*>(weights), layout);
        mma.accumulate_ = GMMA::ScaleOut::One;
        warpgroup_fence_operand(out);
        warpgroup_arrive();
        CUTE_UNROLL
        for (int step = 0; step < size<2>(a); ++step) {
            cute::gemm(mma, a(_, _, step), b(_, _, step), out);
        }
        warpgroup_commit_batch();
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

    // Scores become weights 2^(score - top), and sums follow. True where top was raised: out must
    // be multiplied by factor, which is set only then. find fills bounds in where they are needed.
    template <int kN, typename Scores, typename Find>
    __device__ __forceinline__ bool weigh(Scores& scores, int first, float (&factor)[2],
                                          Find&& find) {
        if (sees_all<kN>(first)) {
            return is_begun(first) ? softmax<kN, false, true>(scores, first, factor)
                                   : softmax<kN, false, false>(scores, first, factor);
        }
        find();
        return is_begun(first) ? softmax<kN, true, true>(scores, first, factor)
                               : softmax<kN, true, false>(scores, first, factor);
    }

    // Whether every row of the warp met a key of its own in an earlier step.
    __device__ __forceinline__ bool is_begun(int first) const {
        return first > full_begin + C::kSkippedKeys;
    }

    // kHasTop: top is that of earlier keys, and none is searched for. A weight may then exceed 1; a
    // sum of weights bounds each of them, so top is raised after the fact. Chunks of 16 keys that
    // no row of the warp sees cost only zeros.
    template <int kN, bool kMasked, bool kHasTop, typename Scores>
    __device__ __forceinline__ bool softmax(Scores& scores, int first, float (&factor)[2]) {
        // Keys that any row of the warp sees.
        const int live_begin = kMasked ? __shfl_sync(kFullMask, bounds[0].x, 0) : 0;
        const int live_end = kMasked ? __shfl_sync(kFullMask, bounds[1].y, 31) : 0;
        const auto is_live = [&](int i) {
            const int column = first + i / 8 * kChunkColumns;
            return !kMasked || (column < live_end && column + kChunkColumns > live_begin);
        };
        if constexpr (kMasked) {
            const int column = first + 2 * (lane % 4);
            const unsigned bits[2] = {column_bits(bounds[0].x - column, bounds[0].y - column),
                                      column_bits(bounds[1].x - column, bounds[1].y - column)};
#pragma unroll
            for (int chunk = 0; chunk < kN / 2; chunk += 8) {
                if (!is_live(chunk)) continue;
#pragma unroll
                for (int i = chunk; i < chunk + 8; ++i) {
                    if (!(bits[(i / 2) % 2] >> (2 * (i / 4) + i % 2) & 1)) scores(i) = -INFINITY;
                }
            }
        }
        bool is_raised = false;
        if constexpr (!kHasTop) {
            float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int chunk = 0; chunk < kN / 2; chunk += 8) {
                if (!is_live(chunk)) continue;
#pragma unroll
                for (int i = chunk; i < chunk + 8; ++i) {
                    largest[(i / 2) % 2] = fmaxf(largest[(i / 2) % 2], scores(i));
                }
            }
            is_raised =
                raise_top(quad_max(largest[0]) * scale(), quad_max(largest[1]) * scale(), factor);
        }
        float added[2] = {0.0f, 0.0f};
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
                const float power = fmaf(scores(i), scale(), -top[half]);
                scores(i) = exp2_approx(power);
                added[half] += scores(i);
            }
        }
        if constexpr (kHasTop) is_raised = raise_after<kN>(scores, added, factor);
        sum[0] += added[0];
        sum[1] += added[1];
        return is_raised;
    }

    // A row's own scores decide, never its neighbours': the vote only skips work that changes
    // nothing.
    __device__ __forceinline__ bool raise_top(float largest0, float largest1,
                                              float (&factor)[2]) {
        const bool raise[2] = {largest0 > top[0] + kMaxSlack, largest1 > top[1] + kMaxSlack};
        if (!__any_sync(kFullMask, raise[0] || raise[1])) return false;
        const float next[2] = {raise[0] ? largest0 : top[0], raise[1] ? largest1 : top[1]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factor[half] = exp2_approx(top[half] - next[half]);
            sum[half] *= factor[half];
            top[half] = next[half];
        }
        return true;
    }

    // Raises top of rows whose new weights are too large, by a power of two, which rounds nothing.
    // A score 2^127 above top is infinite before that: its row comes out as no number and
    // store_tile computes it again.
    template <int kN, typename Scores>
    __device__ __forceinline__ bool raise_after(Scores& scores, float (&added)[2],
                                                float (&factor)[2]) {
        const bool is_far = !(fmaxf(added[0], added[1]) <= kMaxSum);
        if (!__any_sync(kFullMask, is_far)) return false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float most = quad_max(added[half]);
            const int raise = most > kMaxSum ? (__float_as_int(most) >> 23) - 134 : 0;
            factor[half] = __int_as_float((127 - raise) << 23);
            sum[half] *= factor[half];
            added[half] *= factor[half];
            top[half] += static_cast<float>(raise);
        }
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) scores(i) *= factor[(i / 2) % 2];
        return true;
    }
};

}  // namespace bytetx::attention
