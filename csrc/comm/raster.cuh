// The raster order of tiles for rows that belong to ranks: they begin at a row that the caller
// chooses.
#pragma once

namespace bytetx::gemm {

// Rows of cluster tiles in a band: as many as make the operands of one wave of CTAs nearly square,
// but no more than a rank owns.
inline int raster_rows(int tiles_m, int num_ranks) {
    // 8 * 256 rows by 8 * 192 columns are a wave of an H200's 66 clusters.
    constexpr int kMost = 8;
    const int of_rank = tiles_m / num_ranks;
    return of_rank < 1 ? 1 : of_rank > kMost ? kMost : of_rank;
}

}  // namespace bytetx::gemm
