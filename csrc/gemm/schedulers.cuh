// Which tiles a CTA works on, in which order, and over which features.
//
// A scheduler has
//   Inputs                   what the launch tells it
//   rank                     of the CTA in its cluster
//   cluster, num_clusters    tiles cluster, cluster + num_clusters, ... are this CTA's
//   kIsPersistent            whether a CTA has more than its first tile
//   has(tile)                whether there is such a tile
//   tile_m(tile), tile_n(tile)   its first row and column
//   k_blocks()               the blocks of features that this CTA multiplies
//   sync_start(), sync_end() among the CTAs of a cluster: all have barriers; nobody needs them more
//   end_producer()           what the producer's warps do last
//   kProducerReturns         whether they end there, without sync_end()
#pragma once

#include "gemm/config.cuh"

namespace bytetx::gemm {

// The raster order of a persistent kernel's tiles: bands of several rows of tiles, within a band
// along m first. The rows of a of a band stay in L2 while the columns of b pass once. A band of one
// row goes along n and reads its rows of a once.
struct RasterOrder {
    int first;  // first row of cluster tiles; the order wraps around after the last row
    int rows;   // rows of cluster tiles in a band
};

// Base of schedulers whose CTAs have tiles of their own, each over all features.
template <typename C>
struct WholeKCta {
    static constexpr bool kProducerReturns = false;
    const Problem& p;

    __device__ __forceinline__ Share k_blocks() const { return {0, p.num_k_blocks}; }

    __device__ __forceinline__ void sync_start() const {
        if constexpr (C::kClusterCtas > 1) {
            arrive_in_cluster_relaxed();
            wait_for_cluster();
        } else {
            __syncthreads();
        }
    }
    __device__ __forceinline__ void sync_end() const {
        if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
            arrive_in_cluster_relaxed();
            wait_for_cluster();
        }
    }
    __device__ __forceinline__ void end_producer() const {}
};

// Base of persistent schedulers: a CTA has several tiles.
template <typename C>
struct PersistentCta : WholeKCta<C> {
    static constexpr bool kIsPersistent = true;

    __device__ __forceinline__ bool has(int tile) const {
        return tile < this->p.tiles_m * this->p.tiles_n;
    }
};

// The CTAs of a cluster work on tiles below one another: each fetches a part of b and sends it to
// all.
template <typename C>
struct RasterScheduler : PersistentCta<C> {
    using Inputs = RasterOrder;
    const Inputs& raster;
    int rank = C::kClusterCtas > 1 ? cluster_rank() : 0;
    int cluster = static_cast<int>(blockIdx.x) / C::kClusterCtas;
    int num_clusters = static_cast<int>(gridDim.x) / C::kClusterCtas;

    __device__ __forceinline__ RasterScheduler(const Problem& p, const Inputs& raster)
        : PersistentCta<C>{p}, raster(raster) {}

    struct Place {
        int m, n;
    };

    __device__ __forceinline__ Place place(int tile) const {
        const int whole = raster.rows * this->p.tiles_n;
        const int band = tile / whole, within = tile % whole;
        const int height = min(raster.rows, this->p.tiles_m - band * raster.rows);
        int row = band * raster.rows + within % height + raster.first;
        if (row >= this->p.tiles_m) row -= this->p.tiles_m;
        return {row, within / height};
    }
    __device__ __forceinline__ int tile_m(int tile) const {
        return (place(tile).m * C::kClusterCtas + rank) * C::kTileM;
    }
    __device__ __forceinline__ int tile_n(int tile) const { return place(tile).n * C::kTileN; }
};

// The CTAs of a group lie beside one another and work on whole rows of d together.
template <typename C>
struct RowScheduler : PersistentCta<C> {
    struct Inputs {};
    int place = static_cast<int>(blockIdx.x) % C::kGroupCtas;
    int rank = place % C::kClusterCtas;
    int cluster = static_cast<int>(blockIdx.x) / C::kGroupCtas;
    int num_clusters = static_cast<int>(gridDim.x) / C::kGroupCtas;

    __device__ __forceinline__ RowScheduler(const Problem& p, const Inputs&)
        : PersistentCta<C>{p} {}

    __device__ __forceinline__ int tile_m(int tile) const { return tile * C::kTileM; }
    __device__ __forceinline__ int tile_n(int) const { return place * C::kTileN; }
};

// As RasterScheduler, with one tile a CTA, clusters along n.
template <typename C>
struct OneTileScheduler : WholeKCta<C> {
    struct Inputs {};
    static constexpr bool kIsPersistent = false;
    static constexpr int num_clusters = 0;
    int rank = cluster_rank();
    int cluster = static_cast<int>(blockIdx.x) / C::kClusterCtas;
    int m, n;  // origin of the tile, in elements

    __device__ __forceinline__ OneTileScheduler(const Problem& p, const Inputs&)
        : WholeKCta<C>{p},
          m((cluster / p.tiles_n * C::kClusterCtas + rank) * C::kTileM),
          n(cluster % p.tiles_n * C::kTileN) {}

    __device__ __forceinline__ bool has(int) const { return true; }
    __device__ __forceinline__ int tile_m(int) const { return m; }
    __device__ __forceinline__ int tile_n(int) const { return n; }
    __device__ __forceinline__ void sync_end() const {}  // the producer has waited for the others
};

// Base of schedulers whose clusters have one tile: as many CTAs as the launch says share k. The
// tile's place is computed before roles part.
template <typename C>
struct SplitKCta {
    struct Inputs {};
    static constexpr bool kIsPersistent = false;
    static constexpr int num_clusters = 0;
    int rank = cluster_rank();
    int num_ranks = cluster_size();
    int cluster = static_cast<int>(blockIdx.x) / num_ranks;
    int m, n;  // origin of the tile, in elements
    Share blocks;

    __device__ __forceinline__ explicit SplitKCta(const Problem& p)
        : blocks{p.num_k_blocks * rank / num_ranks, p.num_k_blocks * (rank + 1) / num_ranks} {}

    __device__ __forceinline__ bool has(int) const { return true; }
    __device__ __forceinline__ Share k_blocks() const { return blocks; }
    __device__ __forceinline__ int tile_m(int) const { return m; }
    __device__ __forceinline__ int tile_n(int) const { return n; }
};

template <typename C>
struct SplitKScheduler : SplitKCta<C> {
    static constexpr bool kProducerReturns = true;

    __device__ __forceinline__ SplitKScheduler(const Problem& p,
                                               const typename SplitKCta<C>::Inputs&)
        : SplitKCta<C>(p) {
        this->m = this->cluster / p.tiles_n * C::kTileM;
        this->n = this->cluster % p.tiles_n * C::kTileN;
    }

    // The other CTAs' barriers are there behind a wait, which every thread does before it ends.
    __device__ __forceinline__ void sync_start() const {
        __syncthreads();
        if (this->num_ranks > 1) arrive_in_cluster();
    }
    __device__ __forceinline__ void sync_end() const {}
    __device__ __forceinline__ void end_producer() const {
        __syncwarp();
        if (this->num_ranks > 1) wait_for_cluster();
    }
};

}  // namespace bytetx::gemm
