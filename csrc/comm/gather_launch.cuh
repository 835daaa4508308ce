// all_gather_gemm(): which instance of the kernel runs, and its launch.
#pragma once

#include "comm/comm_tilings.cuh"
#include "comm/gather_producer.cuh"
#include "comm/raster.cuh"
#include "gemm/launch.cuh"
#include "gemm/linear_epilogue.cuh"

namespace bytetx::gemm {

template <typename K>
typename K::Params make_gather_params(const AllGatherGemmParams& o) {
    using C = typename K::C;
    const LinearParams& linear = o.linear;
    const PeerMemory& peers = o.peers;
    const int64_t first = o.row_offsets[peers.rank], last = o.row_offsets[peers.rank + 1];
    typename K::Params p{};
    GatherInputs& in = p.producer;
    LinearParams gathered = linear;
    for (int parity = 0; parity < 2; ++parity) {
        gathered.a = static_cast<const uint8_t*>(peers.buffers[peers.rank]) +
                     parity * comm::make_peers(peers).quarter_bytes;
        in.gathered[parity] = make_map(matrix(linear, gathered.a, linear.m, linear.k), C::kTileM);
    }
    static_cast<Problem&>(p) = make_problem<C>(gathered);
    if (last > first) p.a = make_map(matrix(linear, linear.a, last - first, linear.k), C::kTileM);
    p.epilogue = LinearInputs::of(linear);
    in.peers = comm::make_peers(peers);
    in.own_rows = static_cast<const uint8_t*>(linear.a);
    in.row_bytes = static_cast<int>(linear.k * kElementBytes);
    in.chunks_of_piece = chunks_of(in, kPieceRows);
    const int own_rows = static_cast<int>(last - first);
    const int whole = std::max(own_rows - 1, 0) / kPieceRows;  // pieces before the last
    in.own_chunks = whole * in.chunks_of_piece + chunks_of(in, own_rows - whole * kPieceRows);
    for (int i = 0; i <= peers.size; ++i) in.offsets[i] = static_cast<int>(o.row_offsets[i]);
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    // The first rows of tiles that have no rows of the rank before.
    p.scheduler = {static_cast<int>((first + kRows - 1) / kRows) % p.tiles_m,
                   raster_rows(p.tiles_m, peers.size)};
    const bool is_cut_last = last % C::kTileM != 0 && last < linear.m;
    in.sends_to_self = last > first && (first % C::kTileM != 0 || is_cut_last);
    return p;
}

template <typename C, ActivationForm kForm, bool kGated>
void launch_gather(const AllGatherGemmParams& o, cudaStream_t stream) {
    using K = Kernel<C, RasterScheduler, GatherProducer<C>, LinearEpilogue<C, kForm, kGated>>;
    // All of them, however few tiles there are: each CTA also moves rows.
    launch_clusters<K>(make_gather_params<K>(o), max_clusters<K>(), stream);
}

template <typename C>
void launch_gather_epilogue(const AllGatherGemmParams& o, cudaStream_t stream) {
    constexpr bool kCanGate = C::kTileN % (2 * kPermutedRows) == 0;
    const Activation activation = o.linear.activation;
    const bool is_erf = activation == Activation::gelu;
    if (o.linear.gated) {
        if constexpr (kCanGate) {
            if (is_erf) return launch_gather<C, ActivationForm::erf, true>(o, stream);
            return launch_gather<C, ActivationForm::sigmoid, true>(o, stream);
        }
        throw std::invalid_argument(
            "all_gather_gemm: only tilings of a multiple of 64 columns gate");
    }
    if (is_erf) return launch_gather<C, ActivationForm::erf, false>(o, stream);
    if (activation == Activation::none || activation == Activation::relu) {
        return launch_gather<C, ActivationForm::linear, false>(o, stream);
    }
    launch_gather<C, ActivationForm::sigmoid, false>(o, stream);
}

template <typename Tile>
void launch_all_gather_gemm(const AllGatherGemmParams& o, cudaStream_t stream) {
    using Moving = WithMovers<Tile>;
    if (o.linear.dtype == DType::f16) {
        return launch_gather_epilogue<Config<Half, Moving>>(o, stream);
    }
    launch_gather_epilogue<Config<BFloat16, Moving>>(o, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_all_gather_gemm<CommTile128x128>(const AllGatherGemmParams& p,
                                                             cudaStream_t stream);

extern template void launch_all_gather_gemm<Tile128x192>(const AllGatherGemmParams& p,
                                                         cudaStream_t stream);

}  // namespace bytetx::gemm
