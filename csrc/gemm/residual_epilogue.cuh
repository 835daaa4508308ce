// The epilogue of a linear layer whose residual is a tile input, added behind the products.
//
// It comes in strips of 64 columns, each of which is added and stored before the next: a strip's
// room costs no stage where a tile's costs one or two, and the other warpgroup's products hide that
// strips wait for memory one after the other. With whole tiles 65536 rows took up to 9 % longer
// (H100, 2026-11-26).
#pragma once

#include "gemm/linear_epilogue.cuh"
#include "gemm/tile_input.cuh"

namespace bytetx::gemm {

template <typename C>
struct ResidualEpilogue : LinearEpilogue<C, ActivationForm::linear, false> {
    using Linear = LinearEpilogue<C, ActivationForm::linear, false>;
    struct Inputs : LinearInputs {
        CUtensorMap residual_map;  // {n, m}
    };
    struct Smem : SwizzledInput<C> {};
    Smem& s;
    int round;

    template <typename K>
    __device__ __forceinline__ ResidualEpilogue(const K& k, int m, int n, int round)
        : Linear(k, m, n, round), s(k.s.epilogue), round(round) {}

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K& k) {
        init_input_barriers(k.s.epilogue);
    }

    template <typename K>
    static __device__ __forceinline__ void fetch_input(const K& k, uint64_t* full, int tile,
                                                       int strip) {
        const auto hint = L2Policy::evict_first;
        const int column = k.at.tile_n(tile) + strip * C::kInputColumns, row = k.at.tile_m(tile);
        fetch_boxes<C>(k.s.epilogue, [&](auto* to, int offset) {
            load_box(&k.p.epilogue.residual_map, full, hint, to, column + offset, row);
        });
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(Accumulators& sums) const {
        constexpr int kGroups = C::kInputColumns / kPermutedRows;
#pragma unroll
        for (int strip = 0; strip < Smem::kStrips; ++strip) {
            add_input<C>(s, sums, round * Smem::kStrips + strip, strip);
            Linear::store_groups(sums, strip * kGroups, (strip + 1) * kGroups);
        }
    }
};

}  // namespace bytetx::gemm
