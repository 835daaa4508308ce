// From operands to a launch of the GEMM of gemm_reduce_scatter.
#pragma once

#include "comm/scatter_kernel.cuh"
#include "comm/sum_rows.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx::gemm {

// This rank's slot at `owner`: boxes of a warp's rows.
inline CUtensorMap make_slot_map(const GemmSumParams& o, const comm::Peers& peers, int owner) {
    const int64_t rows = o.row_offsets[owner + 1] - o.row_offsets[owner];
    const cuuint64_t row_bytes = cuuint64_t(o.linear.n) * kElementBytes;
    const cuuint64_t sizes[3] = {cuuint64_t(o.linear.n), cuuint64_t(rows), 2};
    const cuuint64_t strides[2] = {row_bytes, cuuint64_t(peers.quarter_bytes)};
    const cuuint32_t box[3] = {kBoxColumns, kBoxRows, 1};
    const auto* slots = static_cast<const uint8_t*>(peers.buffers[owner]) +
                        2 * peers.quarter_bytes + peers.rank * rows * row_bytes;
    return encode_map(o.linear, slots, 3, sizes, strides, box);
}

template <typename C, bool kIsStaged>
void launch_scatter(const GemmSumParams& o, cudaStream_t stream) {
    constexpr int kSmemBytes = kIsStaged ? sizeof(StagedSmem<C>) : sizeof(Smem<C>);
    static_assert(kSmemBytes <= 227 * 1024);
    constexpr int kRows = C::kTileM * C::kClusterCtas;
    const PeerMemory& peers = o.peers;
    ScatterParams p{};
    p.gemm = make_params<C>(o.linear);
    p.peers = comm::make_peers(peers);
    for (int i = 0; i <= peers.size; ++i) p.offsets[i] = static_cast<int>(o.row_offsets[i]);
    for (int i = 0; kIsStaged && i < peers.size; ++i) {
        if (p.offsets[i] < p.offsets[i + 1]) p.slots[i] = make_slot_map(o, p.peers, i);
    }
    const int next = peers.rank + 1 < peers.size ? p.offsets[peers.rank + 1] : 0;
    p.bands = {next / kRows % p.gemm.tiles_m, band_rows(p.gemm.tiles_m, peers.size)};
    p.mode = o.linear.splits;
    if (p.mode & 8) p.bands.alternates = p.gemm.tiles_m;
    const auto kernel = gemm_scatter_kernel<C, kIsStaged>;
    allow_smem(kernel, kSmemBytes);
    static const int most = max_clusters<C>(kernel, kSmemBytes);
    const int num_clusters = std::min(most, p.gemm.tiles_m * p.gemm.tiles_n);
    launch_kernel(kernel,
                  {dim3(num_clusters * C::kClusterCtas), dim3(C::kThreads), kSmemBytes, stream,
                   C::kClusterCtas},
                  p);
    comm::launch_sum(o,
                     comm::sum_shape(p.offsets[peers.rank], p.offsets[peers.rank + 1], C::kTileM,
                                     p.gemm.tiles_n * (kIsStaged ? 4 : 1), false),
                     stream);
}

// The body of a tiling's launcher.
template <typename Tile, bool kIsStaged = false>
void launch_scatter_tiling(const GemmSumParams& o, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) {
        return launch_scatter<Config<cutlass::half_t, Tile>, kIsStaged>(o, stream);
    }
    launch_scatter<Config<cutlass::bfloat16_t, Tile>, kIsStaged>(o, stream);
}

}  // namespace bytetx::gemm
