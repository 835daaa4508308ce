// How tiles of queries, keys and values lie in shared memory for wgmma, and the instructions that
// read them: what packed attention and paged prefill share.
//
// Registers of a thread (wgmma's accumulator layout): rows r0 = 16 * warp + lane / 4 and r0 + 8,
// columns 8 * j + 2 * (lane % 4) + {0, 1}: element 4 * j + e is row r0, 4 * j + 2 + e is row r0
// + 8.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/launch.cuh"
#include "common/ring.cuh"
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
    using Atom = std::conditional_t<kBoxColumns == 64, cute::GMMA::Layout_K_SW128_Atom<T>,
                                    cute::GMMA::Layout_K_SW64_Atom<T>>;
    using LayoutQ = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kTileRows>, cute::Int<kHeadDim>>{}));
    using OrderK = std::conditional_t<kGroupsKeys, cute::Step<cute::_2, cute::_1>,
                                      cute::Step<cute::_1, cute::_2>>;
    using LayoutK = decltype(cute::tile_to_shape(
        Atom{}, cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>{}, OrderK{}));
    using LayoutVt = decltype(cute::composition(
        LayoutK{}, cute::make_layout(cute::Shape<cute::Int<kHeadDim>, cute::Int<kBlockN>>{},
                                     cute::Stride<cute::Int<kBlockN>, cute::_1>{})));
    template <int kN>
    using MmaQk = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kHeadDim>>>()));
    template <int kN>
    using MmaQkOfRegisters = decltype(cute::make_tiled_mma(
        cute::GMMA::rs_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kHeadDim>>>()));
    template <int kN>
    using MmaPv = decltype(cute::make_tiled_mma(
        cute::GMMA::rs_op_selector<T, T, float,
                                   cute::Shape<cute::_64, cute::Int<kHeadDim>, cute::Int<kN>>,
                                   cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
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
template <typename Descriptors>
__device__ __forceinline__ auto known_uniform(const Descriptors& tile) {
    auto start = tile.data();
    start.desc_.reg32_[0] = uniform(static_cast<int>(start.desc_.reg32_[0]));
    return cute::make_tensor(start, tile.layout());
}

// The same of an address in shared memory, which the compiler would work out again and again.
template <typename Smem>
__device__ __forceinline__ Smem* known_uniform(Smem* smem) {
    const int address = uniform(static_cast<int>(cute::cast_smem_ptr_to_uint(smem)));
    return static_cast<Smem*>(__cvta_shared_to_generic(address));
}

}  // namespace bytetx
