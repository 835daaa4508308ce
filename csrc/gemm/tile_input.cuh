// An array of d's size that an epilogue reads: its tiles come by TMA, one tile ahead.
//
// Loaded by the threads that have the sums, they cost 7 000 to 9 000 cycles a tile: misses of 48 KB
// do not fit the L1 that such a kernel leaves. There is room for one tile's, or for a strip of some
// columns, in which case a tile's strips come one after the other: the next is under way as soon as
// a warpgroup has added the one before, while the other multiplies.
//
// An epilogue that has a tile input derives its Smem from TileInput, its launch gives it a tensor
// map, and fetch_input(k, full, tile, strip) issues the copies. The thread that fetches is the
// producer's (fetch_tile_inputs() in producers.cuh).
#pragma once

#include "gemm/epilogue.cuh"

namespace bytetx::gemm {

template <typename C, int kAlignment, int kColumns = C::kTileN>
struct TileInput {
    static constexpr int kStrips = C::kTileN / kColumns;  // strips per tile
    alignas(kAlignment) typename C::Element input[C::kTileM * kColumns];
    uint64_t input_full[C::kConsumers], input_empty;
};

template <typename S>
__device__ __forceinline__ void init_input_barriers(S& s) {
    for (uint64_t& barrier : s.input_full) FullBarrier::init(&barrier, 1);
    EmptyBarrier::init(&s.input_empty, 4);
}

// index: counts the tile inputs, or their strips, that this warpgroup reads.
template <typename S>
__device__ __forceinline__ void wait_for_input(S& s, int index) {
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    FullBarrier::wait(&s.input_full[group], index % 2);  // pairs with fetch_tile_inputs()
}

template <typename S>
__device__ __forceinline__ void release_input(S& s) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.input_empty);
}

constexpr int kBoxColumns = 64;

// [kInputColumns / 64][kTileM][64], swizzled. TMA takes as long for a row of 64 bytes as of 128.
template <typename C>
struct SwizzledInput : TileInput<C, 1024, C::kInputColumns> {};

// copy(to, column): the box of 64 columns that begins `column` columns behind the strip's first.
template <typename C, typename S, typename Copy>
__device__ __forceinline__ void fetch_boxes(S& s, const Copy& copy) {
#pragma unroll
    for (int i = 0; i < C::kInputColumns / kBoxColumns; ++i) {
        copy(s.input + i * C::kTileM * kBoxColumns, i * kBoxColumns);
    }
}

// sums += the tile input, or the strip, number `index` of this warpgroup; strip: which of the tile.
template <typename C, typename S, typename Accumulators>
__device__ __forceinline__ void add_input(S& s, Accumulators& sums, int index, int strip = 0) {
    using Layout = TileLayout<C>;
    constexpr int kGroups = C::kInputColumns / kPermutedRows;  // groups of columns per strip
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    const int row = thread / 32 * 16 + thread % 32 / 4;  // the thread's first, of the tile
    wait_for_input(s, index);
    const auto* words = s.input + row * kBoxColumns;
    // A row's pieces of eight lie at their number, exclusive-or the row's in its eight.
    const int piece = thread % 4 ^ row % 8;
#pragma unroll
    for (int i = 0; i < Layout::kRowsOfThread; ++i) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
            const int box_row = q / 2 * C::kTileM + Layout::row_offset(i);
            const uint4 eight = *reinterpret_cast<const uint4*>(words + box_row * kBoxColumns +
                                                                (piece ^ q % 2 * 4) * 8);
            Layout::add(sums, i, strip * kGroups + q, eight);
        }
    }
    release_input(s);
}

// The same of nothing.
template <typename S>
__device__ __forceinline__ void skip_input(S& s, int index) {
    wait_for_input(s, index);
    release_input(s);
}

}  // namespace bytetx::gemm
