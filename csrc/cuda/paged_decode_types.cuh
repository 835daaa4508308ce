// What the warps of the decode kernel share: parameters, sizes, and what lies in shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/row.cuh"
#include "cuda/paged_mma.cuh"
#include "cuda/paged_plan.cuh"

namespace bytetx::paged {

using Barrier = cutlass::arch::ClusterBarrier;

struct DecodeParams {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    void* out;
    const int* page_table;
    const PagedHeader* header;
    const PagedItem* items;
    unsigned* counters;     // [units, num_kv_heads]
    float* partial_out;     // [partial_rows, num_kv_heads, kDim], sums that are not yet divided
    float2* partial_stats;  // [partial_rows, num_kv_heads] {top, sum}
    int64_t max_pages;
    int64_t q_stride;
    int page_shift;
    int num_heads;
    int num_kv_heads;
    int group;
    int head_dim;
    int window;
    float scale;  // of scores, to powers of two
};

constexpr int kComputeWarps = kRoundKeys / kStepKeys;
constexpr int kScoutWarp = kComputeWarps;
constexpr int kJoinWarp = kComputeWarps + 1;
constexpr int kDecodeThreads = 32 * (kComputeWarps + 2);
constexpr int kItemsAhead = 3;     // in shared memory
constexpr int kStagedSteps = 128;  // of an item whose pages are staged: 2048 keys
constexpr int kJoinRows = 8;       // of a join buffer: half of mma's rows
constexpr int kJoinBuffers = 2;

template <typename T_, int kHeadDim>
struct DecodeTypes {
    using T = T_;
    static constexpr int kDim = kHeadDim;
    // A ring of two is enough: 64 KB of an SM are on their way, twice what the latency of an idle
    // memory needs; more only makes every load wait longer. Warps with rings of kItemsAhead + 1
    // stages would wait for items that wait for them.
    static constexpr int kStages = kHeadDim <= 64 ? 3 : 2;
    static constexpr int kMinCtas = kHeadDim <= 64 ? 3 : 2;
    static constexpr int kPieces = kDim / 8;  // of 16 bytes, a row
    static constexpr int kCopies = kStepKeys * kPieces / 32;
    static constexpr int kTileBytes = kStepKeys * kDim * 2;
    static constexpr int kJoinStride = kDim + 8;  // floats: rows in different banks
    static_assert(kStages <= kItemsAhead);
};

struct StagedItem {
    PagedItem item;
    int kv_head;
    int pages[kStagedSteps];  // of each step, where pages hold a step or more
};

template <typename C>
struct DecodeSmem {
    alignas(128) uint8_t ring[kComputeWarps][C::kStages][2][C::kTileBytes];  // keys, values
    alignas(128) uint8_t q[kItemsAhead][C::kTileBytes];
    alignas(16) float join[kJoinBuffers][kComputeWarps][kJoinRows][C::kJoinStride];
    float2 stats[kJoinBuffers][kComputeWarps][kJoinRows];
    StagedItem staged[kItemsAhead];
    uint64_t item_full[kItemsAhead], item_empty[kItemsAhead];
    uint64_t join_full[kJoinBuffers], join_empty[kJoinBuffers];
};

// Of a row's first element in q or out.
__device__ __forceinline__ int64_t row_address(const DecodeParams& p, const PagedItem& item,
                                               int kv_head, int local, int64_t stride) {
    const int row = item.row + local;
    return (item.first_token + row / p.group) * stride +
           int64_t{kv_head * p.group + row % p.group} * p.head_dim;
}

__device__ __forceinline__ int num_items(const DecodeParams& p) {
    return p.header->num_items * p.num_kv_heads;
}

}  // namespace bytetx::paged
