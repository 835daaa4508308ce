// The GEMM of gemm_reduce_scatter(), and of gemm_all_reduce() for large m: which instance of the
// kernel runs, and its launch.
#pragma once

#include "comm/comm_tilings.cuh"
#include "comm/fused_reduce.cuh"
#include "comm/raster.cuh"
#include "comm/sum_rows.cuh"
#include "gemm/launch.cuh"

namespace bytetx::gemm {

// Everything but the scheduler's inputs, whose raster order is returned.
template <typename C, typename P>
RasterOrder fill_scatter_params(const GemmSumParams& o, bool to_all_ranks, P& p) {
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    const PeerMemory& peers = o.peers;
    ScatterInputs& in = p.epilogue;
    static_cast<Problem&>(p) = make_problem<C>(o.linear);
    static_cast<LinearInputs&>(in) = LinearInputs::of(o.linear);
    in.peers = comm::make_peers(peers);
    for (int i = 0; i <= peers.size; ++i) in.offsets[i] = static_cast<int>(o.row_offsets[i]);
    in.to_all_ranks = to_all_ranks;
    if (to_all_ranks) return {0, raster_rows(p.tiles_m, 1)};
    const int next = peers.rank + 1 < peers.size ? in.offsets[peers.rank + 1] : 0;
    return {next / kRows % p.tiles_m, raster_rows(p.tiles_m, peers.size)};
}

// Shape of the sum of rows [first, last).
template <typename C>
comm::SumShape sum_shape(const Problem& p, int first, int last) {
    const int first_tile = first / C::kTileM;
    return {.first_row = first,
            .num_rows = last - first,
            .first_tile = first_tile,
            .num_tiles = last > first ? (last - 1) / C::kTileM + 1 - first_tile : 0,
            .tile_rows = C::kTileM,
            .count_of_tile = p.tiles_n};
}

template <typename C>
void launch_plain_scatter(const GemmSumParams& o, bool to_all_ranks, cudaStream_t stream) {
    using K = Kernel<C, RasterScheduler, ScatterProducer<C>, ScatterEpilogue<C>>;
    typename K::Params p{};
    p.scheduler = fill_scatter_params<C>(o, to_all_ranks, p);
    launch_persistent<K>(p, stream);
    const int rank = o.peers.rank;
    const int first = to_all_ranks ? 0 : p.epilogue.offsets[rank];
    const int last = to_all_ranks ? p.m : p.epilogue.offsets[rank + 1];
    comm::launch_sum(o, sum_shape<C>(p, first, last), stream);
}

// {n, own rows, size}: what all ranks store for this one, in even or odd calls.
template <typename C>
CUtensorMap make_parts_map(const GemmSumParams& o, const comm::Peers& peers, uint32_t parity) {
    const auto row_bytes = cuuint64_t(o.linear.n) * kElementBytes;
    const auto rows = cuuint64_t(o.norm.total_tokens);
    const cuuint64_t sizes[3] = {cuuint64_t(o.linear.n), rows, cuuint64_t(peers.size)};
    const cuuint64_t strides[2] = {row_bytes, rows * row_bytes};
    const cuuint32_t box[3] = {kBoxColumns, C::kTileM, 1};
    const void* slots = quarter_at(peers, peers.rank, Counted::tiles, parity);
    return encode_map(matrix(o.linear, slots, o.norm.total_tokens, o.linear.n), 3, sizes, strides,
                      box);
}

// For a rank that has rows.
template <typename C>
void launch_fused_reduce(const GemmSumParams& o, cudaStream_t stream) {
    using K = Kernel<C, FusedReduceScheduler, FusedReduceProducer<C>, FusedReduceEpilogue<C>>;
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    typename K::Params p{};
    auto& order = p.scheduler;
    auto& in = p.epilogue;
    order.raster = fill_scatter_params<C>(o, false, p);
    const int own = in.offsets[o.peers.rank], end = in.offsets[o.peers.rank + 1];
    in.residual_map = make_map(matrix(o.linear, o.norm.residual, end - own, o.linear.n), C::kTileM);
    for (uint32_t parity : {0, 1}) in.parts_maps[parity] = make_parts_map<C>(o, in.peers, parity);
    in.bias = o.bias;
    p.d = static_cast<uint8_t*>(o.norm.sum_out) - int64_t{own} * o.linear.n * kElementBytes;
    order.first_adding = (own + kRows - 1) / kRows;
    const int last_adding = end == p.m ? p.tiles_m : end / kRows;
    order.num_adding = std::max(0, last_adding - order.first_adding);
    if (order.num_adding == 0) order.first_adding = order.raster.first;
    launch_persistent<K>(p, stream);
    comm::SumShape shape = sum_shape<C>(p, own, end);
    if (order.num_adding > 0) {
        shape.first_summed = order.first_adding * kRows - own;
        shape.end_summed = std::min(last_adding * kRows, p.m) - own;
    }
    comm::launch_sum(o, shape, stream);
}

template <typename Tile>
void launch_scatter(const GemmSumParams& o, bool to_all_ranks, cudaStream_t stream) {
    const auto launch = [&]<typename T>() {
        if (o.fuse_reduce && o.norm.total_tokens > 0) {
            return launch_fused_reduce<Config<T, WithMovers<WithTileInput<Tile>>>>(o, stream);
        }
        launch_plain_scatter<Config<T, Tile>>(o, to_all_ranks, stream);
    };
    if (o.linear.dtype == DType::f16) return launch.template operator()<Half>();
    launch.template operator()<BFloat16>();
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_scatter<CommTile128x128>(const GemmSumParams& p, bool to_all_ranks,
                                                     cudaStream_t stream);

extern template void launch_scatter<Tile128x192>(const GemmSumParams& p, bool to_all_ranks,
                                                 cudaStream_t stream);

}  // namespace bytetx::gemm
