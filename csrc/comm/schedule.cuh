// RasterOrder of tiles for rows that belong to ranks: they begin at a row that the caller chooses.
#pragma once

#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

// The producer warpgroup also moves rows, so it gets registers of the consumers.
template <typename T, typename Tile>
struct CommConfig : Config<T, Tile> {
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

// Rows of cluster tiles in a band: as many as make the operands of one wave of CTAs nearly square,
// but no more than a rank owns.
inline int raster_rows(int tiles_m, int num_ranks) {
    // 8 * 256 rows by 8 * 192 columns are a wave of an H200's 66 clusters.
    constexpr int kMost = 8;
    const int of_rank = tiles_m / num_ranks;
    return of_rank < 1 ? 1 : of_rank > kMost ? kMost : of_rank;
}

}  // namespace bytetx::gemm
