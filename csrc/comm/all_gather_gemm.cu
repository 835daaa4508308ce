// Linear layers of rows that are dealt to ranks: everyone's rows times this rank's weights.
//
//   d = act(rows b^T + bias)      rows [m, k] of all ranks, of which this one has its own; b [n, k]
//
// One kernel (gather_kernel.cuh) sends this rank's rows to the others, receives theirs, and
// multiplies what has arrived, its own first. Bound by the matrix unit where n / tp_size is large
// (about 1500 to 2000 columns at tp 8), by NVLink below. Source: Flux (arXiv 2406.06858), section
// 4.3, with pushes by bulk copies from the SMs in place of the host's copies.
#include <stdexcept>
#include <string>

#include "comm/comm_tilings.cuh"
#include "common/check.cuh"

namespace bytetx {
namespace {

struct Entry {
    const char* linear_tiling;  // the name of the plan's tiling
    void (*launch)(const AllGatherGemmParams&, cudaStream_t);
};

constexpr Entry kEntries[] = {
    {"128x192", gemm::all_gather_gemm_128x192},
    {"128x128", gemm::all_gather_gemm_128x128},
};

}  // namespace

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
    const std::string name = linear_tiling(o.tiling).name;
    const bool is_narrow = o.gated || name == "128x128";
    kEntries[is_narrow ? 1 : 0].launch(p, static_cast<cudaStream_t>(launch.stream));
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
