// The bands of tiles where rows belong to ranks: they begin at a row of the caller's choice.
#pragma once

#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

// Registers go from the consumers to a producer warpgroup that also moves rows.
template <typename T, typename Tile>
struct CommConfig : Config<T, Tile> {
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

// Rows of cluster tiles in a band: as many as make the operands of one wave of CTAs nearly square,
// but no more than a rank owns.
inline int band_rows(int tiles_m, int num_ranks) {
    constexpr int kMost =
        8;  // 8 * 256 rows beside 8 * 192 columns: a wave of an H200's 66 clusters
    const int of_rank = tiles_m / num_ranks;
    return of_rank < 1 ? 1 : of_rank > kMost ? kMost : of_rank;
}

}  // namespace bytetx::gemm
