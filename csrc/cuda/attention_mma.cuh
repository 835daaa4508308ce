// How tiles of queries, keys and values lie in shared memory for wgmma, and the instructions that
// read them: what packed attention and paged prefill share.
//
// Registers of a thread: see common/wgmma.cuh.
#pragma once

#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "cuda/attention_math.cuh"

namespace bytetx {

constexpr int kTileRows = 64;      // rows of one wgmma
constexpr int kChunkColumns = 16;  // columns that a warp skips together: one step of P V
constexpr int kElementBytes = 2;

// Tiles of kHeadDim features: 64 rows of queries, kKeys of keys and values. kGroupsKeys: eight keys
// with all their features lie next to one another, as boxes of pages arrive, else all keys of as
// many features as a box has.
template <typename T, int kHeadDim, int kKeys, bool kGroupsKeys = false>
struct TileShapes {
    using Element = T;
    static constexpr int kDim = kHeadDim;
    static constexpr int kBlockN = kKeys;
    // Columns of a swizzled row, which is at most 128 bytes, and of one TMA box.
    static constexpr int kBoxColumns = kHeadDim % 64 == 0 ? 64 : 32;
    static constexpr int kQElements = kTileRows * kHeadDim;
    static constexpr int kKvElements = kBlockN * kHeadDim;
    static constexpr int kRowBytes = kBoxColumns * kElementBytes;
    static constexpr int kBoxes = kHeadDim / kBoxColumns;
    // Steps from eight rows to the next eight and from box to box, in the units of Operand.
    static constexpr int kEightRows = 8 * kRowBytes / 16;
    static constexpr int kQBoxStep = kTileRows / 8 * kEightRows;
    static constexpr int kKeyStep = kEightRows * (kGroupsKeys ? kBoxes : 1);
    static constexpr int kBoxStep = kEightRows * (kGroupsKeys ? 1 : kBlockN / 8);

    // Features 16 * step and on.
    static constexpr int feature_offset(int step, int box_step) {
        return step / (kBoxColumns / 16) * box_step + step % (kBoxColumns / 16) * 2;
    }
};

// A byte offset in a tile, swizzled as wgmma reads it.
template <typename C>
__device__ __forceinline__ uint32_t swizzle(uint32_t offset) {
    // 16-byte pieces of a row that are permuted
    constexpr uint32_t kBits = C::kBoxColumns * kElementBytes / 16 - 1;
    return offset ^ ((offset >> 7 & kBits) << 4);
}

// Byte offset of (row, column) in a tile of 64 rows.
template <typename C>
__device__ __forceinline__ uint32_t tile_offset(int row, int column) {
    constexpr int kRowBytes = C::kBoxColumns * kElementBytes;
    return swizzle<C>((column / C::kBoxColumns * kTileRows + row) * kRowBytes +
                      column % C::kBoxColumns * kElementBytes);
}

// The same in a tile whose keys lie in groups of eight.
template <typename C>
__device__ __forceinline__ uint32_t grouped_offset(int key, int column) {
    constexpr int kRowBytes = C::kBoxColumns * kElementBytes, kBoxes = C::kDim / C::kBoxColumns;
    const int row = (key / 8 * kBoxes + column / C::kBoxColumns) * 8 + key % 8;
    return swizzle<C>(row * kRowBytes + column % C::kBoxColumns * kElementBytes);
}

// Makes the start of a tile in shared memory, the same in every lane, known as such: from there on
// the descriptors of its parts are sums of uniform registers. Otherwise the compiler moves each of
// them, a quarter of a step's work.
__device__ __forceinline__ Operand known_uniform(Operand tile) {
    tile.words[0] = static_cast<uint32_t>(uniform(static_cast<int>(tile.words[0])));
    return tile;
}

// The same of an address in shared memory, which the compiler would work out again and again.
template <typename Smem>
__device__ __forceinline__ Smem* known_uniform(Smem* smem) {
    const int address = uniform(static_cast<int>(smem_address(smem)));
    return static_cast<Smem*>(__cvta_shared_to_generic(address));
}

}  // namespace bytetx
