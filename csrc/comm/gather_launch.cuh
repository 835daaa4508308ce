// From operands to a launch of all_gather_gemm.
#pragma once

#include <string>

#include "comm/gather_kernel.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx::gemm {

template <typename C>
GatherParams make_gather_params(const AllGatherGemmParams& o) {
    LinearParams own = o.linear;
    const PeerMemory& peers = o.peers;
    const int64_t first = o.row_offsets[peers.rank], last = o.row_offsets[peers.rank + 1];
    GatherParams p{};
    LinearParams gathered = o.linear;
    for (int parity = 0; parity < 2; ++parity) {
        gathered.a = static_cast<const uint8_t*>(peers.buffers[peers.rank]) +
                     parity * comm::make_peers(peers).quarter_bytes;
        p.gathered[parity] = make_a_map(gathered, C::kTileM);
    }
    p.gemm = make_params<C>(gathered);
    if (last > first) {
        own.m = last - first;
        p.gemm.a = make_a_map(own, C::kTileM);
    }
    p.peers = comm::make_peers(peers);
    p.own_rows = static_cast<const uint8_t*>(o.linear.a);
    p.row_bytes = static_cast<int>(o.linear.k * kElementBytes);
    p.chunks_of_piece = chunks_of(p, kPieceRows);
    const int own_rows = static_cast<int>(last - first);
    const int whole = std::max(own_rows - 1, 0) / kPieceRows;  // pieces before the last
    p.own_chunks = whole * p.chunks_of_piece + chunks_of(p, own_rows - whole * kPieceRows);
    for (int i = 0; i <= peers.size; ++i) p.offsets[i] = static_cast<int>(o.row_offsets[i]);
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    // The first rows of tiles that have no rows of the rank before.
    p.gemm.raster = {static_cast<int>((first + kRows - 1) / kRows) % p.gemm.tiles_m,
                     raster_rows(p.gemm.tiles_m, peers.size)};
    const bool is_cut_last = last % C::kTileM != 0 && last < o.linear.m;
    p.sends_to_self = last > first && (first % C::kTileM != 0 || is_cut_last);
    return p;
}

template <typename C, Epilogue kEpilogue, bool kGated>
void launch_gather(const AllGatherGemmParams& o, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(GatherSmem<C>);
    static_assert(kSmemBytes <= 227 * 1024);
    const GatherParams p = make_gather_params<C>(o);
    const auto kernel = all_gather_gemm_kernel<C, kEpilogue, kGated>;
    allow_smem(kernel, kSmemBytes);
    static const int most = max_clusters<C>(kernel, kSmemBytes);
    // All of them, however few tiles there are: each CTA also moves rows.
    launch_kernel(
        kernel,
        {dim3(most * C::kClusterCtas), dim3(C::kThreads), kSmemBytes, stream, C::kClusterCtas}, p);
}

template <typename C>
void launch_gather_epilogue(const AllGatherGemmParams& o, cudaStream_t stream) {
    constexpr bool kCanGate = C::kTileN % (2 * kPermutedRows) == 0 && C::kTileN <= 128;
    const Activation activation = o.linear.activation;
    const bool is_erf = activation == Activation::gelu;
    if (o.linear.gated) {
        if constexpr (kCanGate) {
            if (is_erf) return launch_gather<C, Epilogue::erf, true>(o, stream);
            return launch_gather<C, Epilogue::sigmoid, true>(o, stream);
        }
        throw std::invalid_argument("all_gather_gemm: this tiling is too wide for gates");
    }
    if (is_erf) return launch_gather<C, Epilogue::erf, false>(o, stream);
    if (activation == Activation::none || activation == Activation::relu) {
        return launch_gather<C, Epilogue::linear, false>(o, stream);
    }
    launch_gather<C, Epilogue::sigmoid, false>(o, stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_gather_tiling(const AllGatherGemmParams& o, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) {
        return launch_gather_epilogue<CommConfig<cutlass::half_t, Tile>>(o, stream);
    }
    launch_gather_epilogue<CommConfig<cutlass::bfloat16_t, Tile>>(o, stream);
}

}  // namespace bytetx::gemm
