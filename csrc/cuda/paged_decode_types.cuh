// Shared by the warps of the decode kernel: parameters, sizes, and the layout of shared memory.
#pragma once

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/row.cuh"
#include "cuda/paged_mma.cuh"
#include "cuda/paged_plan.cuh"
#include "cuda/softmax_state.cuh"

namespace bytetx::paged {

struct DecodeParams {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    const uint8_t* k_scales;  // [num_pages, num_kv_heads, page_size], where the caches are codes
    const uint8_t* v_scales;
    void* out;
    const int* page_table;
    const PagedHeader* header;
    const PagedItem* items;
    unsigned* counters;  // [units, num_kv_heads]
    float* partial_out;  // [partial_rows, num_kv_heads, kDim], sums that are not yet divided
    SoftmaxState* partial_states;  // [partial_rows, num_kv_heads]
    int64_t max_pages;
    int64_t q_stride;
    int page_shift;
    int num_heads;
    int num_kv_heads;
    int group;
    int head_dim;
    int window;
    float scale;  // factor of scores, to powers of two
    ScoreChange change;
    int early_read;
    bool beside_tiles;
};

constexpr int kComputeWarps = 4;
constexpr int kScoutWarp = kComputeWarps;
constexpr int kFetchWarp = kComputeWarps + 1;  // and the next: keys, values
constexpr int kJoinWarp = kComputeWarps + 3;
constexpr int kDecodeThreads = 32 * (kComputeWarps + 4);
constexpr int kItemsAhead = 3;  // in shared memory

// Sizes of keys and values in shared memory: of T, or E4M3 codes with the scales of a step behind.
template <int kDim, bool kCodes>
struct KeyTypes {
    static constexpr bool kHasCodes = kCodes;
    static constexpr int kKeyBytes = kCodes ? 1 : 2;   // an element
    static constexpr int kPieceKeys = 16 / kKeyBytes;  // elements of a piece of 16 bytes
    static constexpr int kPieces = kDim / kPieceKeys;  // pieces per row of keys
    static constexpr int kQPieces = kDim / 8;          // the same of queries
    static constexpr int kScaleBytes = kCodes ? kStepKeys : 0;
};

template <typename T_, int kHeadDim, int kNumTiles, bool kCodes = false>
struct DecodeTypes : KeyTypes<kHeadDim, kCodes> {
    using T = T_;
    using Keys = KeyTypes<kHeadDim, kCodes>;
    static constexpr int kDim = kHeadDim;
    static constexpr int kTiles = kNumTiles;  // tiles of eight rows
    static constexpr int kRows = 8 * kTiles;
    static constexpr int kTileBytes = kStepKeys * kDim * Keys::kKeyBytes;
    static constexpr int kHalfBytes = kTileBytes + Keys::kScaleBytes;
    // Steps of a stage of the ring. One of codes has half the bytes, and would be bound by the
    // instructions of the warps that fetch.
    static constexpr int kStageSteps = kCodes ? 2 : 1;
    static constexpr int kStageKeys = kStageSteps * kStepKeys;
    // Two CTAs an SM, 128 KB on their way at most: copies alone, in rings of this size, reach the
    // rate of a plain sum (238.8 us for 64 sequences of 4096 keys, 237.3); half of it takes 242.7.
    static constexpr int kMinCtas = ctas_per_sm(kTiles, kDim);
    static constexpr int kStages =
        (kMinCtas == 1 ? 128 : 64) * 1024 / (2 * kStageSteps * kTileBytes);
    static constexpr int kSumStride = kDim + 4;  // floats
    // The stages of item after item go to the warps round-robin, and so does each one to one warp:
    // it never waits for a phase that is two ahead.
    static_assert(kStages % kComputeWarps == 0);

    static __device__ __forceinline__ uint32_t offset(int row, int piece) {
        return piece_offset<8 * Keys::kPieces>(row, piece);
    }
    static __device__ __forceinline__ uint32_t q_offset(int row, int piece) {
        return piece_offset<kDim>(row, piece);
    }
    static __device__ __forceinline__ int num_stages(int keys) {
        return (keys + kStageKeys - 1) / kStageKeys;
    }
};

// For few sequences: an SM's only CTA has all of the ring that fits. 16 sequences of 1024 keys take
// 18.3 us, 19.9 with 64 KB (H200). With 64 features copies are bound by their instructions.
template <typename T_, bool kCodes = false>
struct AloneTypes : DecodeTypes<T_, 128, 1, kCodes> {
    static constexpr int kMinCtas = 1;
    static constexpr int kStages = kCodes ? 40 / DecodeTypes<T_, 128, 1, kCodes>::kStageSteps : 20;
};

struct StagedItem {
    PagedItem item;
    int kv_head;
};

template <typename C>
struct DecodeSmem {
    alignas(128) uint8_t ring[C::kStages][2][C::kStageSteps * C::kHalfBytes];  // keys, values
    alignas(128) uint8_t q[kItemsAhead][C::kRows * C::kDim * 2];
    alignas(16) float join[kComputeWarps][C::kRows][C::kSumStride];
    SoftmaxState states[kComputeWarps][C::kRows];
    alignas(16) float joined[C::kRows][C::kDim];  // sums of an item's chunks so far
    SoftmaxState joined_states[2][C::kRows];      // the same, of an even and of an odd number
    StagedItem staged[kItemsAhead];
    uint64_t full[C::kStages][2], empty[C::kStages][2];  // one for keys, one for values
    uint64_t item_full[kItemsAhead], item_empty[kItemsAhead];
    uint64_t join_full, join_empty;
};

// Offset of a row's first element in q or out, in elements.
__device__ __forceinline__ int64_t row_address(const DecodeParams& p, const PagedItem& item,
                                               int kv_head, int local, int64_t stride) {
    const int row = item.row + local;
    return (item.first_token + row / p.group) * stride +
           int64_t{kv_head * p.group + row % p.group} * p.head_dim;
}

// Where a unit's rows stand, for the change of their scores.
struct UnitRows {
    const DecodeParams& p;
    const PagedItem& item;
    int kv_head;

    __device__ __forceinline__ int head(int local) const {
        const int row = item.row + min(local, item.num_rows - 1);
        return kv_head * p.group + row % p.group;
    }
};

__device__ __forceinline__ int num_items(const DecodeParams& p) {
    return __ldcg(&p.header->num_items) * p.num_kv_heads;
}

// The items of one CTA: one of each round of as many items as there are CTAs, in odd rounds from
// the other end. Items come longest first, so that all CTAs get about as many keys. `uniform`: the
// compiler does not see that a loop-carried index is the same in all lanes, and would make each
// shuffle of the loops that it bounds ready for divergent ones.
struct OwnItems {
    int current = static_cast<int>(blockIdx.x);
    int step = 2 * static_cast<int>(gridDim.x - blockIdx.x) - 1;  // to the next; two make 2 rounds

    __device__ int next() const { return current + step; }
    __device__ void advance() {
        current = uniform(current + step);
        step = uniform(2 * static_cast<int>(gridDim.x) - step);
    }
};

// An item's record, an int a lane.
__device__ __forceinline__ int load_record(const DecodeParams& p, int index, int lane) {
    constexpr int kInts = sizeof(PagedItem) / sizeof(int);
    const auto* item = reinterpret_cast<const int*>(p.items + index / p.num_kv_heads);
    return lane < kInts ? __ldcg(item + lane) : 0;
}

}  // namespace bytetx::paged
