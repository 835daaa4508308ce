// Where the parts of a paged plan lie in its buffer: paged_plan.cu writes, the attention kernels
// read; and how keys are cut into chunks.
//
//   PagedHeader  counts
//   PagedItem    items[max_items]     for the decode kernel, each times every key head; longest
//                                     first
//   PagedTile    tiles[max_tiles]     for the prefill kernel, likewise; longest sequences first
//   unsigned     counters[max_units * num_kv_heads]   0 between launches
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cache_ops.h"
#include "cuda/attention_plan.cuh"

namespace bytetx::paged {

constexpr int kUnitRows = 16;  // rows of one mma
// Rows of a unit of so many features: above 128 the sums of eight fill the registers.
constexpr int most_unit_rows(int head_dim) { return head_dim > 128 ? 8 : kUnitRows; }

constexpr int kStepKeys = 16;        // keys that a warp of the decode kernel takes at a time
constexpr int kRoundKeys = 64;       // four warps take one step each
constexpr int64_t kAlignment = 128;  // bytes, of what lies behind a plan
constexpr int kMaxChunks = 32;       // chunks per sequence: one lane each where they are joined
constexpr int kClearedItems = 512;   // items of a plan that may be read before their number
constexpr int kClusterCtas = 8;      // the most that any Hopper GPU runs as one

// A unit is up to kUnitRows rows of a piece, (token, query head of the group), the heads of a token
// next to one another. An item is a unit against all keys of its piece, chunk after chunk, or
// against one of the chunks.
struct alignas(16) PagedItem {
    int sequence;
    int first_token;    // first token of the piece, in q
    int row, num_rows;  // rows of the unit in its piece
    int position;       // index of the piece's first token among its keys
    int first_visible;  // key that any row of the piece sees
    int first_key;      // a multiple of kStepKeys
    int end_key;
    int chunk_keys;   // keys of every chunk but the piece's last
    int chunk;        // the first of the item
    int num_chunks;   // chunks of the piece
    int partial_row;  // row of chunk 0, where each chunk is an item
    int unit;         // its counters there

    // Where the chunk that begins with key `first` ends.
    __host__ __device__ int chunk_end(int first) const {
        return first + chunk_keys < end_key ? first + chunk_keys : end_key;
    }

    // Whether other items have the other chunks of its keys.
    __host__ __device__ bool is_split() const {
        return num_chunks > 1 && end_key - first_key <= chunk_keys;
    }
};

// Steps of so many keys.
__host__ __device__ inline int num_steps_of(int keys) { return (keys + kStepKeys - 1) / kStepKeys; }

// A run of tokens of one piece, with all query heads of a key head.
struct alignas(16) PagedTile {
    int sequence;
    int first_token;  // in q
    int num_rows;     // tokens * group
    int position;     // index of the first token among its piece's keys
    int first_visible;
    int end_key;
};

// item_keys, tile_keys: sums over items and tiles, of one key head; a tile counts as kTileStart
// keys more than it has.
struct alignas(16) PagedHeader {
    int num_items;
    int num_tiles;
    attention::Counters counters;  // counters of the prefill kernel
    int item_keys;
    int tile_keys;
};

constexpr int kTileStart = 192;

// Warpgroups of 64 rows that a prefill tile has.
constexpr int prefill_warpgroups(int head_dim) { return attention::pipeline_rows(head_dim) / 64; }

// How many units of one row and key head there may be, by which rows find their kernel: a matter of
// the batch's size, never of what is in it.
inline int64_t row_units(const PagedPlanParams& p) {
    return std::min(p.batch_size, p.total_tokens) * p.num_kv_heads;
}

// Whether clusters read the decode rows, without a plan (paged_cluster.cuh): few sequences have the
// SMs to themselves and want many of them at once. One of 1024 keys takes 5.2 us, 8.1 by items, one
// of 16384 24 either way (H200, 2026-11-21).
inline bool uses_clusters(const PagedPlanParams& p) {
    constexpr int64_t kFewUnits = 64;  // half the SMs
    return p.tile_tokens > 0 && row_units(p) <= kFewUnits && !p.batch_invariant;
}

// Whether decode rows and tiles run at once, on SMs of their own: the first are bound by memory,
// the second by arithmetic, and neither kernel leaves the other room on an SM.
inline bool runs_side_by_side(const PagedPlanParams& p) {
    // Where all pieces are as long as the longest, there are no decode rows.
    return p.tile_tokens > 0 && p.max_seqlen > 1 && !uses_clusters(p) && !p.batch_invariant &&
           p.total_tokens < p.batch_size * p.max_seqlen;
}

// How one sequence's keys are cut into chunks, a function of its own keys alone: into chunks of up
// to kChunkKeys, into kManyChunks while those hold up to twice as many keys, then of that many, and
// at last into kMaxChunks. A chunk has a softmax of its own, and chunks are joined in the order of
// the keys, so that a result does not depend on which of them are items of their own.
//
// One of 8192 keys among 63 of one key wants many chunks: 15.5 us of 512 keys, 17.9 of 1024 (H200,
// 2026-11-21).
constexpr int kChunkKeys = 1024;
constexpr int kManyChunks = 8;

__host__ __device__ inline int count_chunks(int keys) {
    const int single = (keys + kChunkKeys - 1) / kChunkKeys;
    const int twice = (keys + 2 * kChunkKeys - 1) / (2 * kChunkKeys);
    const int few = single < kManyChunks ? single : kManyChunks;
    const int wanted = few > twice ? few : twice;
    return wanted < kMaxChunks ? wanted : kMaxChunks;
}

__host__ __device__ inline int chunk_length(int keys) {
    const int chunks = count_chunks(keys), even = (keys + chunks - 1) / chunks;
    return (even + kRoundKeys - 1) / kRoundKeys * kRoundKeys;
}

// Features that the decode kernel is built for.
inline int padded_dim(int head_dim) {
    return head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// Tiles of eight rows that a unit has: without tiles for prefill every unit has kUnitRows rows.
inline int unit_tiles(const PagedPlanParams& p) {
    return p.tile_tokens > 0 && p.num_heads / p.num_kv_heads <= 8 ? 1 : 2;
}

// CTAs of the decode kernel per SM, unless an SM has one CTA for another reason.
constexpr int ctas_per_sm(int num_tiles, int dim) { return num_tiles * dim > 128 ? 1 : 2; }

// Whether few sequences have the decode kernel with one CTA an SM, which has all shared memory.
inline bool has_sm_alone(const PagedPlanParams& p, int sms) {
    return padded_dim(p.head_dim) == 128 && unit_tiles(p) == 1 && row_units(p) <= sms;
}

// The decode kernel's CTAs, and how many of them together read at the rate of the memory.
struct DecodeCtas {
    int all, full_rate;
};

inline DecodeCtas decode_ctas(const PagedPlanParams& p, int sms) {
    constexpr int kFullRateSms = 90, kFullRateNarrow = 210;  // narrow: bound by instructions
    const int dim = padded_dim(p.head_dim);
    const int per_sm = has_sm_alone(p, sms) ? 1 : ctas_per_sm(unit_tiles(p), dim);
    return {per_sm * sms, dim <= 64 ? kFullRateNarrow : per_sm * kFullRateSms};
}

// Sizes that a batch cannot exceed, from host integers alone.
struct PlanSizes {
    int64_t units, items, tiles, counters, partial_rows;
};

inline PlanSizes plan_sizes(const PagedPlanParams& p) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t pieces = std::min(p.batch_size, p.total_tokens);
    const bool has_tiles = p.tile_tokens > 0 && (p.max_seqlen > 1 || p.batch_invariant);
    const int64_t tiles = has_tiles ? p.total_tokens / p.tile_tokens + p.batch_size : 0;
    if (uses_clusters(p) || p.batch_invariant) return {0, 0, tiles, 0, 0};
    // Without tiles every piece is cut into units of kUnitRows rows, else those of one token.
    const int64_t rows = p.tile_tokens > 0 ? pieces * group : p.total_tokens * group;
    const int64_t units = p.tile_tokens > 0 ? pieces * ((group + kUnitRows - 1) / kUnitRows)
                                            : rows / kUnitRows + p.batch_size;
    const int64_t chunks = count_chunks(std::max(p.max_kv_seqlen, 1));
    return {units, units * chunks, tiles, units * p.num_kv_heads, chunks > 1 ? rows * chunks : 0};
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
