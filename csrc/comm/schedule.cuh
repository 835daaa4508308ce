// The order of tiles where rows belong to ranks: it begins at a row of the caller's choice and goes
// round, in bands of several rows of tiles, within which neighbours along m come first. A band
// is read together: its rows of a stay in L2 while the columns of b pass once.
#pragma once

#include "cuda/linear_types.cuh"

namespace bytetx::gemm {

// Registers go from the consumers to a producer warpgroup that also moves rows.
template <typename T, typename Tile>
struct CommConfig : Config<T, Tile> {
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

struct Bands {
    int first;  // row of cluster tiles that comes first
    int rows;   // of cluster tiles in a band
};

template <typename C>
struct BandSchedule : Schedule<C> {
    const Bands& bands;

    __device__ __forceinline__ explicit BandSchedule(const Bands& bands) : bands(bands) {}

    struct Place {
        int m, n;
    };

    __device__ __forceinline__ Place place(const Params& p, int tile) const {
        const int whole = bands.rows * p.tiles_n;
        const int band = tile / whole, within = tile % whole;
        const int height = min(bands.rows, p.tiles_m - band * bands.rows);
        int row = band * bands.rows + within % height + bands.first;
        if (row >= p.tiles_m) row -= p.tiles_m;
        return {row, within / height};
    }
    __device__ __forceinline__ int tile_m(const Params& p, int tile) const {
        return (place(p, tile).m * C::kClusterCtas + this->rank) * C::kTileM;
    }
    __device__ __forceinline__ int tile_n(const Params& p, int tile) const {
        return place(p, tile).n * C::kTileN;
    }
};

// Rows of cluster tiles in a band: as many as make the operands of one wave of CTAs nearly square,
// but no more than a rank owns.
inline int band_rows(int tiles_m, int num_ranks) {
    constexpr int kMost = 8;  // 8 * 256 rows beside 8 * 192 columns: a wave of an H200's 66 clusters
    const int of_rank = tiles_m / num_ranks;
    return of_rank < 1 ? 1 : of_rank > kMost ? kMost : of_rank;
}

}  // namespace bytetx::gemm
