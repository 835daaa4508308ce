// Where the parts of a paged plan lie in its buffer: paged_plan.cu writes, the attention kernels
// read; and how keys are cut into chunks.
//
//   PagedHeader  counts
//   PagedItem    items[max_items]     for the decode kernel, each times every key head
//   PagedTile    tiles[max_tiles]     for the prefill kernel, likewise; those with most keys first
//   unsigned     counters[max_units * num_kv_heads]   0 between launches
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ops.h"

namespace bytetx::paged {

constexpr int kUnitRows = 16;        // rows of one mma
constexpr int kStepKeys = 16;        // keys that a warp of the decode kernel takes at a time
constexpr int kRoundKeys = 64;       // four warps take one step each
constexpr int64_t kAlignment = 128;  // bytes, of what lies behind a plan
constexpr int kMaxChunks = 32;       // of a sequence: a lane each where they are joined

// A unit is up to kUnitRows rows of a piece against one chunk of its keys. Rows of a piece are
// (token, query head of the group), the heads of a token next to one another.
struct alignas(16) PagedItem {
    int sequence;
    int first_token;    // of the piece, in q
    int row, num_rows;  // of the unit in its piece
    int position;       // of the piece's first token among its keys
    int first_visible;  // key that any row of the piece sees
    int first_key;      // a multiple of kStepKeys
    int end_key;
    int chunk, num_chunks;
    int partial_row;  // of chunk 0, where there are several chunks
    int unit;         // its counters
};

// A run of tokens of one piece, with all query heads of a key head.
struct alignas(16) PagedTile {
    int sequence;
    int first_token;  // in q
    int num_rows;     // tokens * group
    int position;     // of the first token among its piece's keys
    int first_visible;
    int first_key;  // a multiple of kRoundKeys
    int end_key;
    int unused;
};

struct alignas(16) PagedHeader {
    int num_items;
    int num_tiles;
    unsigned next_tile;  // of the running prefill kernel; 0 between launches
    unsigned done_ctas;
};

// How one sequence's keys are cut: a function of its own keys, and of the batch's size in two
// classes. Chunks of about chunk_keys keys, up to kMaxChunks of them, then longer ones.
struct Chunking {
    int chunk_keys;

    __host__ __device__ int length(int keys) const {
        const int wanted = (keys + chunk_keys - 1) / chunk_keys;
        const int count = wanted < kMaxChunks ? wanted : kMaxChunks;
        const int even = (keys + count - 1) / count;
        return (even + kRoundKeys - 1) / kRoundKeys * kRoundKeys;
    }
};

// A chunk's end costs the joining warp some 6 us under a saturated memory, in which a CTA's share
// of it streams 200 keys of 128 features: chunks of 512 keys hide it (0.93 to 0.98 of the copy rate
// for 64 sequences of 4096 keys, 256 keys 0.71 to 0.95). Few sequences want all SMs at work at
// once: one of 1024 keys takes 8.1 us in chunks of 128, 13 us in chunks of 512 (H200, 2026-11-21).
inline Chunking chunking(const PagedPlanParams& p) {
    constexpr int64_t kFewUnits = 64;  // half the SMs
    const bool is_few = std::min(p.batch_size, p.total_tokens) * p.num_kv_heads <= kFewUnits;
    return {is_few ? 128 : 512};
}

// Sizes that a batch cannot exceed, from host integers alone.
struct PlanSizes {
    int64_t units, items, tiles, counters, partial_rows;
};

inline PlanSizes plan_sizes(const PagedPlanParams& p) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    // Without tiles every piece is cut into units of kUnitRows rows.
    const int64_t units = p.tile_tokens > 0 ? std::min(p.batch_size, p.total_tokens)
                                            : p.total_tokens * group / kUnitRows + p.batch_size;
    const int64_t rows = p.tile_tokens > 0 ? units * group : p.total_tokens * group;
    const int64_t chunk_keys = chunking(p).chunk_keys;
    const int64_t keys = std::max<int64_t>(p.max_kv_seqlen, 1);
    const int64_t chunks = std::min<int64_t>((keys + chunk_keys - 1) / chunk_keys, kMaxChunks);
    const int64_t tiles =
        p.tile_tokens > 0 && p.max_seqlen > 1 ? p.total_tokens / p.tile_tokens + p.batch_size : 0;
    return {units, units * chunks, tiles, units * p.num_kv_heads,
            p.max_kv_seqlen > chunk_keys ? rows * chunks : 0};
}

struct PlanView {
    PagedHeader* header;
    PagedItem* items;
    PagedTile* tiles;
    unsigned* counters;
};

inline PlanView view_plan(int32_t* plan, const PlanSizes& sizes) {
    auto* header = reinterpret_cast<PagedHeader*>(plan);
    auto* items = reinterpret_cast<PagedItem*>(header + 1);
    auto* tiles = reinterpret_cast<PagedTile*>(items + sizes.items);
    return {header, items, tiles, reinterpret_cast<unsigned*>(tiles + sizes.tiles)};
}

}  // namespace bytetx::paged
