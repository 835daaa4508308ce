// Products of staged rows with panels of a weight on tiles, the epilogue of one block beside the
// products of the next.
//
// A panel is 32 outputs; a group is the 4 bytes of each that one instruction takes together, so 16
// groups of a panel are two tiles whose rows take turns. Rows are staged tile by tile, each 1 KiB
// in one piece: [rows / 16, steps, 16, 64 bytes].
//
// Block: 32 rows x 32 outputs, four tiles of sums. A step loads four tiles and multiplies four
// pairs of them, 64 cycles of the multiplier. Its results wait in L1 while the next block's steps
// run, and a few of their rows go through the epilogue in each: tiles and vectors are units of
// their own.
#pragma once

#include "cpu/tile_blocks.h"
#include "cpu/tiles.h"

namespace bytetx::cpu::BYTETX_SIMD {

constexpr int64_t kStepGroups = tiles::kRows;
constexpr int64_t kPanelColumns = 32;
constexpr int64_t kGroupBytes = kPanelColumns * 4;
constexpr int64_t kStepBytes = kStepGroups * kGroupBytes;
constexpr int64_t kTileBytes = tiles::kRows * tiles::kRowBytes;

// Format: the product of two tiles. High: whether there is a second tile of rows. weight: the
// panel's first step; last: its last one. beside: called once a step.
template <class Format, bool kHigh, class Beside>
inline void sum_steps(const uint8_t* rows, const uint8_t* weight, const uint8_t* last,
                      int64_t num_steps, typename Format::Sum* sums, Beside beside) {
    constexpr int64_t kStride = kPanelColumns * sizeof(typename Format::Sum);
    tiles::zero<0>();
    tiles::zero<1>();
    if constexpr (kHigh) {
        tiles::zero<2>();
        tiles::zero<3>();
    }
    for (int64_t step = 0; step < num_steps; ++step) {
        const uint8_t* b = step + 1 == num_steps ? last : weight + step * kStepBytes;
        const uint8_t* a = rows + step * kTileBytes;
        tiles::load<6>(b, kGroupBytes);
        tiles::load<4>(a, tiles::kRowBytes);
        Format::template multiply<0, 4, 6>();
        tiles::load<7>(b + kGroupBytes / 2, kGroupBytes);
        Format::template multiply<1, 4, 7>();
        if constexpr (kHigh) {
            tiles::load<5>(a + num_steps * kTileBytes, tiles::kRowBytes);
            Format::template multiply<2, 5, 6>();
            Format::template multiply<3, 5, 7>();
        }
        beside();
    }
    tiles::store<0>(sums, kStride);
    tiles::store<1>(sums + kPanelColumns / 2, kStride);
    if constexpr (kHigh) {
        tiles::store<2>(sums + tiles::kRows * kPanelColumns, kStride);
        tiles::store<3>(sums + tiles::kRows * kPanelColumns + kPanelColumns / 2, kStride);
    }
}

// Sums of a block, some of whose rows have been through the epilogue.
template <typename Sum>
struct FinishedRows {
    const Sum* sums = nullptr;
    int64_t row = 0;
    int64_t column = 0;
    int64_t num_rows = 0;
    int64_t done = 0;

    // finish(sums, row, column): the epilogue of a row's 32 sums.
    template <class Finish>
    void finish(int64_t count, Finish& finish) {
        const int64_t end = num_rows - done < count ? num_rows : done + count;
        for (; done < end; ++done) finish(sums + done * kPanelColumns, row + done, column);
    }
};

// num_rows staged rows with panels [first, last), each of num_groups groups. weight_of(i): panel i.
template <class Format, class WeightOf, class Finish>
[[gnu::noinline]] inline void multiply_staged(const uint8_t* rows, int64_t num_rows,
                                              int64_t num_groups, int64_t first, int64_t last,
                                              WeightOf weight_of, Finish finish) {
    using Sum = typename Format::Sum;
    constexpr int64_t kBlockRows = 2 * tiles::kRows;
    alignas(64) uint8_t rest[kStepBytes];
    alignas(64) Sum sums[2][kBlockRows * kPanelColumns];
    const int64_t num_steps = (num_groups + kStepGroups - 1) / kStepGroups;
    const int64_t rest_bytes = num_groups % kStepGroups * kGroupBytes;
    FinishedRows<Sum> before;
    int turn = 0;
    const tiles::Tiles configured;
    for (int64_t panel = first; panel < last; ++panel) {
        const uint8_t* weight = weight_of(panel);
        const uint8_t* last_step = weight + (num_steps - 1) * kStepBytes;
        if (rest_bytes != 0) {  // zeros behind what there is
            __builtin_memset(rest, 0, kStepBytes);
            __builtin_memcpy(rest, last_step, rest_bytes);
            last_step = rest;
        }
        for (int64_t row = 0; row < num_rows; row += kBlockRows, turn ^= 1) {
            const uint8_t* a = rows + row / tiles::kRows * num_steps * kTileBytes;
            const int64_t share = (before.num_rows + num_steps - 1) / num_steps;
            const auto beside = [&] { before.finish(share, finish); };
            const int64_t count = num_rows - row < kBlockRows ? num_rows - row : kBlockRows;
            if (count > tiles::kRows) {
                sum_steps<Format, true>(a, weight, last_step, num_steps, sums[turn], beside);
            } else {
                sum_steps<Format, false>(a, weight, last_step, num_steps, sums[turn], beside);
            }
            before = {sums[turn], row, panel * kPanelColumns, count};
        }
    }
    before.finish(before.num_rows, finish);
}

// Byte i, a multiple of 64, of row r among staged rows of num_steps tiles.
inline int64_t staged_offset(int64_t row, int64_t num_steps) {
    return row / tiles::kRows * num_steps * kTileBytes + row % tiles::kRows * tiles::kRowBytes;
}

}  // namespace bytetx::cpu::BYTETX_SIMD
