// The product of a share of k, in f32, for the norm behind it to add up: no cluster, and nobody
// waits for another share. Joining the shares in the product's kernel takes from 2 200 cycles, as
// long as the products of several blocks (docs/kernels/linear.md).
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/schedulers.cuh"

namespace bytetx::gemm {

// Where a part has the eight columns from 8 * eight on: in two halves, each beside those of the
// other threads that store at once, so that whole sectors are written. Offsets within a row.
constexpr int kPartHalf = kPermutedRows / 2;

__host__ __device__ constexpr int part_column(int eight) {
    return eight / 4 * kPermutedRows + eight % 4 * 4;
}

// CTA num_parts * tile + part has the part's blocks of features of a tile.
template <typename C>
struct PartScheduler {
    struct Inputs {
        int num_parts;
    };
    static constexpr bool kIsPersistent = false;
    static constexpr bool kProducerReturns = true;
    static constexpr int num_clusters = 0;
    static constexpr int rank = 0;  // no clusters
    int cluster, part;
    int m, n;  // origin of the tile, in elements
    Share blocks;

    __device__ __forceinline__ PartScheduler(const Problem& p, const Inputs& in)
        : cluster(static_cast<int>(blockIdx.x) / in.num_parts),
          part(static_cast<int>(blockIdx.x) % in.num_parts),
          m(cluster / p.tiles_n * C::kTileM),
          n(cluster % p.tiles_n * C::kTileN),
          blocks{p.num_k_blocks * part / in.num_parts, p.num_k_blocks * (part + 1) / in.num_parts} {
    }

    __device__ __forceinline__ bool has(int) const { return true; }
    __device__ __forceinline__ Share k_blocks() const { return blocks; }
    __device__ __forceinline__ int tile_m(int) const { return m; }
    __device__ __forceinline__ int tile_n(int) const { return n; }
    __device__ __forceinline__ void sync_start() const { __syncthreads(); }
    __device__ __forceinline__ void sync_end() const {}
    __device__ __forceinline__ void end_producer() const {}
};

template <typename C>
struct PartEpilogue : EpilogueDefaults, TileLayout<C> {
    struct Inputs {
        float* parts;  // [parts, m, n]
    };
    using Layout = TileLayout<C>;
    float* part;

    template <typename K>
    __device__ __forceinline__ PartEpilogue(const K& k, int m, int n, int)
        : Layout(k.p, m, n),
          part(k.p.epilogue.parts + int64_t{k.at.part} * k.p.m * k.p.n + part_column(n / 8) +
               part_column(this->lane % 4)) {}

    template <typename Sums, typename Wait>
    __device__ __forceinline__ void begin(Sums& sums, const Wait& wait) const {
        sums.clear();
        wait();
    }

    template <typename Sums>
    __device__ __forceinline__ void finish(const Sums& sums) const {
#pragma unroll
        for (int i = 0; i < Layout::kRowsOfThread; ++i) {
            if (this->row(i) >= this->p.m) continue;
            float* out = part + int64_t{this->row(i)} * this->p.n;
#pragma unroll
            for (int q = 0; q < Layout::kColumnGroups; ++q) {
                if (!this->has_group(q)) continue;
                const auto four = [&](int e) {
                    return make_float4(sums(Layout::at(i, q, e)), sums(Layout::at(i, q, e + 1)),
                                       sums(Layout::at(i, q, e + 2)),
                                       sums(Layout::at(i, q, e + 3)));
                };
                auto* at = reinterpret_cast<float4*>(out + q * kPermutedRows);
                at[0] = four(0);
                at[kPartHalf / 4] = four(4);
            }
        }
    }
};

}  // namespace bytetx::gemm
