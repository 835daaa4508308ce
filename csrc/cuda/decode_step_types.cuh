// Shapes of the decode-step kernel: how matrices are divided over CTAs, warps and slots of the
// ring, the packets in memory, and what a CTA keeps in shared memory.
//
// A matrix has blocks of eight rows, and a CTA an equal number of neighbouring blocks, give or take
// one. A *slot* is one block's part of kSlotK features. Two blocks are the 16 rows of a tile of the
// tensor core. Slots arrive in the order in which they are multiplied, batch after batch:
//
//   all in registers at once        more than that: a tile after another, part after part
//     tile 0: part 0 of both blocks,  |  batch 0: tile 0, parts 0 .. b - 1
//             part 1 of both, ...     |  batch 1: tile 0, parts b ..
//     tile 1: ...                     |  batch 2: tile 1, parts 0 .. b - 1
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "cuda/softmax_state.cuh"
#include "decode_step_ops.h"

namespace bytetx::decode {

constexpr int kCtas = 128;  // for 132 SMs
constexpr int kWarps = 8;   // that multiply; one more copies weights
constexpr int kThreads = kWarps * 32;
constexpr int kBlockRows = 8;
constexpr int kSlotK = 1024;  // features of a block in one slot
constexpr int kSlotBytes = kBlockRows * kSlotK * 2;
constexpr int kWarpK = kSlotK / kWarps;  // features that a warp multiplies
constexpr int kSteps = kWarpK / 32;      // steps per slot and warp, two mma each
constexpr int kHeldSlots = 4;            // a batch: 64 registers
constexpr int kMostSlots = 12;           // slots in the ring
constexpr int kSmemBytes = 232448;       // that a CTA may have
constexpr int kSumStride = kWarps + 4;   // floats; no bank conflicts
constexpr int kTableKeys = 512;          // keys of a CTA whose cache slots are kept
constexpr int kSplits = 16;              // CTAs of a KV head with many keys
// Half slots that are copied to at a time. More of them queue at the memory, and packets that are
// in the L2 wait behind them: without a limit a step took 473 us, with two 430, four 417, three 410
// (100 keys, H100).
constexpr int kWindow = 3;
constexpr int kCopies = 4;  // copies of packets that every CTA reads

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The largest divisor of n that is at most `most`.
constexpr int divisor(int n, int most) {
    int found = std::min(n, std::max(most, 1));
    while (n % found != 0) --found;
    return found;
}

// A slot's place in its weight.
struct Slot {
    uint32_t offset;     // its first byte
    uint16_t row_bytes;  // 0: the CTA has no such block
    uint8_t product;     // one of the layer's four
    uint8_t batch;       // counted over the layer's products
};

// d = a weight [rows, k] times a vector. group: blocks that stay together in a CTA, two for a
// block of gates and its values.
template <int rows, int k, int group = 1>
struct Product {
    static constexpr int kRows = rows, kK = k, kGroup = group;
    static constexpr int kGroups = rows / (kBlockRows * group);
    static constexpr bool kIsEven = kGroups % kCtas == 0;
    static constexpr int kParts = ceil_div(k, kSlotK);  // parts of the vector
    // A row's bytes in a slot: rows of one part adjoin as they do in memory.
    static constexpr int kRowBytes = std::min(k, kSlotK) * 2;
    static constexpr int kOwnGroups = ceil_div(kGroups, kCtas);  // at most
    static constexpr int kOwnBlocks = kOwnGroups * group;
    // All weights in registers beside the packets of the input: at most 100, four at a time.
    static constexpr bool kIsWhole = 4 * kOwnBlocks * kParts + kParts <= 25;
    static constexpr int kBlocks =  // with one that no CTA has, where tiles must be alike
        kIsWhole || kOwnBlocks == 1 ? kOwnBlocks : ceil_div(kOwnBlocks, 2) * 2;
    static constexpr int kTiles = ceil_div(kBlocks, 2);
    static constexpr int kTileBlocks = std::min(kBlocks, 2);
    static constexpr int kBatchParts =
        kIsWhole ? kParts : divisor(kParts, kHeldSlots / kTileBlocks);
    static constexpr int kBatchTiles = kIsWhole ? kTiles
                                       : kBatchParts == kParts
                                           ? divisor(kTiles, kHeldSlots / (kTileBlocks * kParts))
                                           : 1;
    static constexpr int kPartBatches = kParts / kBatchParts;
    static constexpr int kBatches = kTiles / kBatchTiles * kPartBatches;
    static constexpr int kSlots = kBlocks * kParts;
    static constexpr int kBatchSlots = kSlots / kBatches;
    // Chains of sums: neighbouring products do not wait for one another.
    static constexpr int kChains = !kIsWhole || kParts == 1 ? 2 : std::min(kParts, 3);
    static constexpr bool kHasGaps = k % kSlotK != 0 || !kIsEven || kBlocks > kOwnBlocks;
    static_assert(rows % (kBlockRows * group) == 0 && k % 64 == 0 && kBatchSlots <= 16);

    static constexpr int blocks_of(int tile) { return std::min(2, kBlocks - 2 * tile); }
    static constexpr int chain(int part, int step) {
        return kParts == 1 ? step % 2 : part % kChains;
    }

    static __device__ __forceinline__ int first_group(int cta) { return cta * kGroups / kCtas; }
    static __device__ __forceinline__ int num_groups(int cta) {
        return kIsEven ? kOwnGroups : first_group(cta + 1) - first_group(cta);
    }
    // Rows of d that are the CTA's, from kBlockRows * first_group() on; of gates where kGroup is 2.
    static __device__ __forceinline__ int num_rows(int cta) { return kBlockRows * num_groups(cta); }

    // The slot that comes as number `index` of the product's.
    static __device__ Slot slot(int cta, int index, int product, int first_batch) {
        const int batch = index / kBatchSlots, in_batch = index % kBatchSlots;
        const int in_tiles = in_batch / (kTileBlocks * kBatchParts);
        const int in_tile = in_batch % (kTileBlocks * kBatchParts);
        const int tile = batch / kPartBatches * kBatchTiles + in_tiles;
        const int blocks = blocks_of(tile);
        const int part = batch % kPartBatches * kBatchParts + in_tile / blocks;
        const int block = 2 * tile + in_tile % blocks;
        const int own_group = block / kGroup;
        const int first = kBlockRows * (first_group(cta) + own_group);
        // Blocks of 32 gates and of their values take turns.
        const int row = kGroup == 1 ? first : 64 * (first / 32) + first % 32 + 32 * (block % 2);
        const bool is_there = own_group < num_groups(cta);
        Slot found{};
        found.offset = is_there ? (uint32_t{kK} * row + kSlotK * part) * 2 : 0;
        found.row_bytes = is_there ? min(kSlotK, kK - kSlotK * part) * 2 : 0;
        found.product = product;
        found.batch = first_batch + batch;
        return found;
    }
};

template <int hidden, int inner, int heads, int kv_heads, int head_dim, bool has_bias = false>
struct Config {
    static constexpr int kHidden = hidden, kInner = inner, kHeads = heads, kKvHeads = kv_heads;
    static constexpr int kHeadDim = head_dim;
    static constexpr bool kHasBias = has_bias;
    static constexpr int kGroup = heads / kv_heads;  // query heads of a KV head
    static constexpr int kQkvRows = (heads + 2 * kv_heads) * head_dim;
    static constexpr int kAttended = heads * head_dim;
    using Qkv = Product<kQkvRows, hidden>;
    using AttnOut = Product<hidden, kAttended>;
    using FfnIn = Product<2 * inner, hidden, 2>;
    using FfnOut = Product<hidden, inner>;
    static constexpr int kXParts = Qkv::kParts;
    static constexpr int kXBlocks = FfnOut::kOwnBlocks;  // blocks of x that a CTA adds to
    static constexpr int kAttnOutSlot = Qkv::kSlots;     // index among a layer's slots
    static constexpr int kFfnInSlot = kAttnOutSlot + AttnOut::kSlots;
    static constexpr int kFfnOutSlot = kFfnInSlot + FfnIn::kSlots;
    static constexpr int kLayerSlots = kFfnOutSlot + FfnOut::kSlots;
    static constexpr int kAttnOutBatch = Qkv::kBatches;
    static constexpr int kFfnInBatch = kAttnOutBatch + AttnOut::kBatches;
    static constexpr int kFfnOutBatch = kFfnInBatch + FfnIn::kBatches;
    static constexpr int kLayerBatches = kFfnOutBatch + FfnOut::kBatches;
    static constexpr int kMaxRows =
        kBlockRows * std::max({Qkv::kBlocks, AttnOut::kBlocks, FfnIn::kBlocks, FfnOut::kBlocks});
    static constexpr int kMaxParts = std::max({kXParts, AttnOut::kParts, FfnOut::kParts});
    static constexpr bool kHasGaps =
        Qkv::kHasGaps || AttnOut::kHasGaps || FfnIn::kHasGaps || FfnOut::kHasGaps;
    static_assert(heads % kv_heads == 0 && kv_heads * kSplits <= kCtas);
    static_assert(head_dim == 64 || head_dim == 128);
    static_assert(inner % 32 == 0);
    // Each CTA has a part of ffn_in: see Workspace.
    static_assert(FfnIn::kGroups >= kCtas);

    static __device__ Slot slot(int index, int cta) {
        if (index < kAttnOutSlot) return Qkv::slot(cta, index, 0, 0);
        if (index < kFfnInSlot) return AttnOut::slot(cta, index - kAttnOutSlot, 1, kAttnOutBatch);
        if (index < kFfnOutSlot) return FfnIn::slot(cta, index - kFfnInSlot, 2, kFfnInBatch);
        return FfnOut::slot(cta, index - kFfnOutSlot, 3, kFfnOutBatch);
    }
};

// Packets, twice: layers take turns. When a CTA writes those of layer i + 2, every CTA has read
// those of layer i, for each has sent its part of layer i + 1's `inner`.
template <typename C>
struct Workspace {
    struct Common {                           // packets that every CTA reads
        uint64_t x[C::kHidden];               // after the feed-forward half
        uint64_t middle[C::kHidden];          // after the attention half
        uint64_t attended[C::kAttended / 2];  // two bf16 a packet
        uint64_t inner[C::kInner / 2];        // two bf16 a packet
    };
    struct Layer {
        Common copies[kCopies];     // CTA i reads copy i % kCopies
        uint64_t qkv[C::kQkvRows];  // f32
        // Sums of a part of the keys, not divided, and their states: maximum and sum of weights.
        uint64_t split[C::kKvHeads][kSplits][C::kGroup][C::kHeadDim];
        uint64_t split_states[C::kKvHeads][kSplits][C::kGroup][2];
    };
    Layer layers[2];
    uint32_t epoch;  // the last tag of the step before
};

// Shared memory beside the ring.
template <typename C>
struct StepSmem {
    alignas(16) float attended[kWarps][C::kGroup][C::kHeadDim];
    SoftmaxState attended_states[kWarps][C::kGroup];
    alignas(16) float sums[2][C::kMaxRows + 1][kSumStride];  // the last row: squares of x
    alignas(16) __nv_bfloat16 slice[kWarps][C::kMaxParts * kWarpK];
    alignas(16) float q[C::kGroup][C::kHeadDim];
    alignas(16) __nv_bfloat16 k[C::kHeadDim];
    alignas(16) __nv_bfloat16 v[C::kHeadDim];
    // At the new token's position.
    alignas(16) float cos[C::kHeadDim / 2];
    alignas(16) float sin[C::kHeadDim / 2];
    int past;                                      // keys before the new one
    int cache_slots[kTableKeys];                   // where the CTA's first keys lie
    DecodeStepLayer layers[kMaxDecodeStepLayers];  // a new line of parameters would be read late
    Slot slots[C::kLayerSlots];
    uint64_t empty[C::kLayerBatches];
};

template <typename C>
struct Smem : StepSmem<C> {
    static constexpr int kRingSlots =
        std::min({kMostSlots, C::kLayerSlots,
                  (kSmemBytes - int{sizeof(StepSmem<C>)} - 128) / (kSlotBytes + 16)});
    static_assert(kRingSlots >= 6);  // the most slots of a batch
    alignas(128) uint8_t ring[kRingSlots][kSlotBytes];
    uint64_t full[2 * kRingSlots];  // one per half of a slot
};

}  // namespace bytetx::decode
