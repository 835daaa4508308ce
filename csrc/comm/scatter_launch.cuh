// From operands to a launch of the GEMM of gemm_reduce_scatter, and of gemm_all_reduce for large m.
#pragma once

#include "comm/scatter_add_kernel.cuh"
#include "comm/sum_rows.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx::gemm {

template <typename C>
ScatterParams make_scatter_params(const GemmSumParams& o, bool to_all_ranks) {
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    const PeerMemory& peers = o.peers;
    ScatterParams p{};
    p.gemm = make_params<C>(o.linear);
    p.peers = comm::make_peers(peers);
    for (int i = 0; i <= peers.size; ++i) p.offsets[i] = static_cast<int>(o.row_offsets[i]);
    const int next = peers.rank + 1 < peers.size ? p.offsets[peers.rank + 1] : 0;
    p.gemm.raster = {next / kRows % p.gemm.tiles_m, raster_rows(p.gemm.tiles_m, peers.size)};
    if (to_all_ranks) p.gemm.raster = {0, raster_rows(p.gemm.tiles_m, 1)};
    p.to_all_ranks = to_all_ranks;
    return p;
}

template <typename C, typename P>
void launch_scatter_kernel(void (*kernel)(P), int smem_bytes, const P& p, cudaStream_t stream) {
    allow_smem(kernel, smem_bytes);
    static const int most = max_clusters<C>(kernel, smem_bytes);
    const int num_clusters = std::min(most, p.gemm.tiles_m * p.gemm.tiles_n);
    launch_kernel(kernel,
                  {dim3(num_clusters * C::kClusterCtas), dim3(C::kThreads), smem_bytes, stream,
                   C::kClusterCtas},
                  p);
}

// Of rows [first, last).
template <typename C>
comm::SumShape sum_shape(const ScatterParams& p, int first, int last) {
    const int first_tile = first / C::kTileM;
    return {.first_row = first,
            .num_rows = last - first,
            .first_tile = first_tile,
            .num_tiles = last > first ? (last - 1) / C::kTileM + 1 - first_tile : 0,
            .tile_rows = C::kTileM,
            .count_of_tile = p.gemm.tiles_n};
}

template <typename C>
void launch_scatter(const GemmSumParams& o, bool to_all_ranks, cudaStream_t stream) {
    const ScatterParams p = make_scatter_params<C>(o, to_all_ranks);
    static_assert(sizeof(Smem<C>) <= kMostSmemBytes);
    launch_scatter_kernel<C>(gemm_scatter_kernel<C>, sizeof(Smem<C>), p, stream);
    const int rank = o.peers.rank;
    const int first = to_all_ranks ? 0 : p.offsets[rank];
    const int last = to_all_ranks ? p.gemm.m : p.offsets[rank + 1];
    comm::launch_sum(o, sum_shape<C>(p, first, last), stream);
}

// {n, own rows, size}: what all ranks store for this one, in even or odd calls.
template <typename C>
CUtensorMap make_parts_map(const GemmSumParams& o, const comm::Peers& peers, uint32_t parity) {
    const auto row_bytes = cuuint64_t(o.linear.n) * kElementBytes;
    const auto rows = cuuint64_t(o.norm.total_tokens);
    const cuuint64_t sizes[3] = {cuuint64_t(o.linear.n), rows, cuuint64_t(peers.size)};
    const cuuint64_t strides[2] = {row_bytes, rows * row_bytes};
    const cuuint32_t box[3] = {kResidualColumns, C::kTileM, 1};
    const void* slots = quarter_at(peers, peers.rank, Counted::tiles, parity);
    return encode_map(o.linear, slots, 3, sizes, strides, box);
}

// For a rank that has rows. C: a configuration with shared memory for residuals.
template <typename C>
void launch_scatter_add(const GemmSumParams& o, cudaStream_t stream) {
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    ScatterAddParams p{};
    static_cast<ScatterParams&>(p) = make_scatter_params<C>(o, false);
    const int own = p.offsets[o.peers.rank], end = p.offsets[o.peers.rank + 1];
    LinearParams residual = o.linear;
    residual.residual = o.norm.residual;
    residual.m = end - own;
    p.residual_map = make_residual_map<C>(residual);
    for (uint32_t parity : {0, 1}) p.parts_maps[parity] = make_parts_map<C>(o, p.peers, parity);
    p.gemm.bias = o.bias;
    p.gemm.d = static_cast<uint8_t*>(o.norm.sum_out) - int64_t{own} * o.linear.n * kElementBytes;
    p.first_adding = (own + kRows - 1) / kRows;
    const int last_adding = end == p.gemm.m ? p.gemm.tiles_m : end / kRows;
    p.num_adding = std::max(0, last_adding - p.first_adding);
    if (p.num_adding == 0) p.first_adding = p.gemm.raster.first;
    launch_scatter_kernel<C>(gemm_scatter_add_kernel<C>, sizeof(ResidualSmem<C>), p, stream);
    comm::SumShape shape = sum_shape<C>(p, own, end);
    if (p.num_adding > 0) {
        shape.first_summed = p.first_adding * kRows - own;
        shape.end_summed = std::min(last_adding * kRows, p.gemm.m) - own;
    }
    comm::launch_sum(o, shape, stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_scatter_tiling(const GemmSumParams& o, bool to_all_ranks, cudaStream_t stream) {
    const auto launch = [&]<typename T>() {
        if (o.fuse_reduce && o.norm.total_tokens > 0) {
            return launch_scatter_add<CommConfig<T, WithResidual<Tile>>>(o, stream);
        }
        launch_scatter<Config<T, Tile>>(o, to_all_ranks, stream);
    };
    if (o.linear.dtype == DType::f16) return launch.template operator()<cutlass::half_t>();
    launch.template operator()<cutlass::bfloat16_t>();
}

}  // namespace bytetx::gemm
