// all_gather_gemm: a linear layer whose input rows are sharded over the ranks.
//
//   d = act(rows b^T + bias)      rows [m, k] of all ranks; b [n, k], this rank's weights
//
// One kernel (gemm/kernel.cuh with gather_producer.cuh) sends this rank's rows to the others,
// receives theirs, and multiplies what has arrived, its own rows first. Bound by the tensor cores
// where n / tp_size is large (about 1500 to 2000 columns at tp 8), by NVLink below. Source: Flux
// (arXiv 2406.06858), section 4.3, with bulk copies from the SMs in place of the host's copies.
#include <stdexcept>
#include <string>

#include "comm/comm_tilings.cuh"
#include "common/check.cuh"

namespace bytetx {

void all_gather_gemm(const AllGatherGemmParams& p, const Launch& launch) {
    const LinearParams& o = p.linear;
    comm::check("all_gather_gemm", o, p.peers, p.row_offsets);
    if (o.residual != nullptr) throw std::invalid_argument("all_gather_gemm adds no residual");
    if ((o.m + 128) * o.k * 2 > p.peers.buffer_bytes / 4) {
        throw std::invalid_argument("all_gather_gemm: " + std::to_string(o.m) + " rows of " +
                                    std::to_string(o.k) + " features do not fit the workspace");
    }
    if (o.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (comm::tile_columns("all_gather_gemm", o) == 128) {
        gemm::launch_all_gather_gemm<gemm::CommTile128x128>(p, stream);
    } else {
        gemm::launch_all_gather_gemm<gemm::Tile128x192>(p, stream);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
