// Copies by one warp of a cluster: its rows' queries, and the keys and values of a step.
#pragma once

#include <type_traits>

#include "cuda/paged_decode_rows.cuh"

namespace bytetx::paged {

constexpr int kClusterStages = 2;

template <typename T_, int kHeadDim, int kNumTiles, bool kCodes = false>
struct ClusterTypes : KeyTypes<kHeadDim, kCodes> {
    using T = T_;
    using Keys = KeyTypes<kHeadDim, kCodes>;
    static constexpr int kDim = kHeadDim;
    static constexpr int kTiles = kNumTiles;  // tiles of eight rows
    static constexpr int kRows = 8 * kTiles;
    static constexpr int kWarps = kDim <= 64 ? 8 : 4;  // 16384 keys: 17.4 against 21.4 us of four
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kAllKeys = kWarps * kStepKeys;  // that the warps take at a time
    // Without a bound ptxas loads one fragment at a time, each product after its own: 28 us for
    // 16384 keys instead of 24.
    static constexpr int kMinCtas = kDim > 128 ? 1 : 16 / kWarps / kTiles;
    // Eight neighbouring rows: different banks.
    static constexpr int kRowBytes = kDim * Keys::kKeyBytes + 16;
    static constexpr int kQRowBytes = kDim * 2 + 16;
    static constexpr int kTileBytes = kStepKeys * kRowBytes;
    static constexpr int kHalfBytes = kTileBytes + Keys::kScaleBytes;
    static constexpr int kSumStride = kDim + 4;  // floats
    static constexpr int kSlice = kDim / kClusterCtas;
    static_assert(kSlice % 4 == 0 && kRows * kSumStride * 4 <= kClusterStages * 2 * kHalfBytes);

    static __device__ __forceinline__ uint32_t offset(int row, int piece) {
        return row * kRowBytes + piece * 16;
    }
    static __device__ __forceinline__ uint32_t q_offset(int row, int piece) {
        return row * kQRowBytes + piece * 16;
    }
};

// Copies the rows of 16 keys and values to shared memory, a piece of a row a lane.
template <typename C>
struct StepCopy {
    using T = std::conditional_t<C::kHasCodes, uint8_t, typename C::T>;
    static constexpr int kRowsAtOnce = 32 / C::kPieces;
    const DecodeParams& p;
    int lane;
    int row, bytes;       // the lane's first row; 16, or 0 in the padding of a head
    int64_t row_stride;   // elements
    int64_t lane_offset;  // elements from a key's first one
    uint32_t to;          // bytes from a stage's first one

    __device__ StepCopy(const DecodeParams& params, int of_lane) : p(params), lane(of_lane) {
        const int piece = lane % C::kPieces;
        row = lane / C::kPieces;
        row_stride = int64_t{p.num_kv_heads} * p.head_dim;
        bytes = piece * C::kPieceKeys < p.head_dim ? 16 : 0;
        lane_offset = row * row_stride + (bytes > 0 ? piece * C::kPieceKeys : 0);
        to = C::offset(row, piece);
    }

    // Keys whose slots are neighbours, as in a page; rows outside [begin, end) become zeros.
    __device__ void neighbours(uint32_t stage, int64_t slot, int kv_head, int begin, int end) {
        if constexpr (C::kHasCodes) copy_scales(stage + C::kTileBytes, slot, kv_head);
        const int64_t from = slot * row_stride + kv_head * p.head_dim + lane_offset;
        if (begin <= 0 && end >= kStepKeys) return copy<true>(stage + to, from, begin, end);
        copy<false>(stage + to, from, begin, end);
    }

    // Those of keys and of values, a lane each; of keys that no row sees they may be anything.
    __device__ void copy_scales(uint32_t at, int64_t slot, int kv_head) {
        const int64_t row = (slot >> p.page_shift) * p.num_kv_heads + kv_head;
        const int64_t from = (row << p.page_shift) + (slot & ((1 << p.page_shift) - 1));
        if (lane == 0) copy_or_zero(at, p.k_scales + from, 16);
        if (lane == 1) copy_or_zero(at + C::kHalfBytes, p.v_scales + from, 16);
    }

    template <bool kAll>
    __device__ void copy(uint32_t at, int64_t from, int begin, int end) {
        const T* k = static_cast<const T*>(p.k_cache) + from;
        const T* v = static_cast<const T*>(p.v_cache) + from;
#pragma unroll
        for (int i = 0; i < kStepKeys; i += kRowsAtOnce) {
            const int own = kAll || (row + i >= begin && row + i < end) ? bytes : 0;
            copy_or_zero(at + i * C::kRowBytes, k, own);
            copy_or_zero(at + i * C::kRowBytes + C::kHalfBytes, v, own);
            k += kRowsAtOnce * row_stride;
            v += kRowsAtOnce * row_stride;
        }
    }

    // Keys anywhere: `slot` is that of key lane % 16, or -1.
    __device__ void scattered(uint32_t stage, int slot, int kv_head) {
#pragma unroll
        for (int i = 0; i < kStepKeys; i += kRowsAtOnce) {
            const int own = __shfl_sync(kFullMask, slot, row + i);
            const int64_t from =
                max(own, 0) * row_stride + kv_head * p.head_dim + lane_offset - row * row_stride;
            const uint32_t at = stage + to + i * C::kRowBytes;
            const int size = own >= 0 ? bytes : 0;
            copy_or_zero(at, static_cast<const T*>(p.k_cache) + from, size);
            copy_or_zero(at + C::kHalfBytes, static_cast<const T*>(p.v_cache) + from, size);
        }
    }
};

// A unit's queries in registers of kThreads threads, between memory and shared memory.
template <typename C, int kThreads>
struct StagedQueries {
    static constexpr int kCount = (C::kRows * C::kQPieces + kThreads - 1) / kThreads;
    uint4 words[kCount];

    __device__ void load(const DecodeParams& p, const PagedItem& item, int kv_head, int thread) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = (i * kThreads + thread) / C::kQPieces;
            const int piece = (i * kThreads + thread) % C::kQPieces;
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
            const int row = (i * kThreads + thread) / C::kQPieces;
            const int piece = (i * kThreads + thread) % C::kQPieces;
            if (row < C::kRows) *reinterpret_cast<uint4*>(to + C::q_offset(row, piece)) = words[i];
        }
    }
};

}  // namespace bytetx::paged
