// From operands to a launch of the GEMM of gemm_reduce_scatter, and of gemm_all_reduce where rows are
// many.
#pragma once

#include "comm/scatter_kernel.cuh"
#include "comm/sum_rows.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx::gemm {

template <typename C>
void launch_scatter(const GemmSumParams& o, bool is_for_all, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(Smem<C>);
    static_assert(kSmemBytes <= 227 * 1024);
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    const PeerMemory& peers = o.peers;
    ScatterParams p{};
    p.gemm = make_params<C>(o.linear);
    p.peers = comm::make_peers(peers);
    for (int i = 0; i <= peers.size; ++i) p.offsets[i] = static_cast<int>(o.row_offsets[i]);
    const int next = peers.rank + 1 < peers.size ? p.offsets[peers.rank + 1] : 0;
    p.gemm.bands = {next / kRows % p.gemm.tiles_m, band_rows(p.gemm.tiles_m, peers.size)};
    if (is_for_all) p.gemm.bands = {0, band_rows(p.gemm.tiles_m, 1)};
    p.is_for_all = is_for_all;
    const auto kernel = gemm_scatter_kernel<C>;
    allow_smem(kernel, kSmemBytes);
    static const int most = max_clusters<C>(kernel, kSmemBytes);
    const int num_clusters = std::min(most, p.gemm.tiles_m * p.gemm.tiles_n);
    launch_kernel(kernel,
                  {dim3(num_clusters * C::kClusterCtas), dim3(C::kThreads), kSmemBytes, stream,
                   C::kClusterCtas},
                  p);
    const int first = is_for_all ? 0 : p.offsets[peers.rank];
    const int last = is_for_all ? p.gemm.m : p.offsets[peers.rank + 1];
    const int first_tile = first / C::kTileM;
    comm::launch_sum(o,
                     {.first_row = first,
                      .num_rows = last - first,
                      .first_tile = first_tile,
                      .num_tiles = last > first ? (last - 1) / C::kTileM + 1 - first_tile : 0,
                      .tile_rows = C::kTileM,
                      .count_of_tile = p.gemm.tiles_n},
                     stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_scatter_tiling(const GemmSumParams& o, bool is_for_all, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) {
        return launch_scatter<Config<cutlass::half_t, Tile>>(o, is_for_all, stream);
    }
    launch_scatter<Config<cutlass::bfloat16_t, Tile>>(o, is_for_all, stream);
}

}  // namespace bytetx::gemm
