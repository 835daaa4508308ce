// Linear layers whose inputs are dealt to ranks: the products' sum, each rank its own rows, with
// what comes behind it.
//
//   h = sum over ranks (a b^T + partial) + bias + residual;  out = norm(h)
//
// gemm_reduce_scatter: scatter_kernel.cuh stores tiles where they belong, sum_rows.cu sums; or
// scatter_add_kernel.cuh's last tiles sum, and sum_rows.cu norms.
// gemm_all_reduce: every rank sums all rows; one_shot_kernel.cuh stores tiles of few rows in all
// staging buffers, scatter_kernel.cuh those of some hundred rows in all slots. Or a row's owner
// sums it for all: its staging buffer alone takes the tiles, and two_shot.cu does the rest. The
// first is bound by the matrix unit where k / tp_size is large (about 1500 to 2000 features at tp
// 8), by NVLink below; the second by the weights' bytes and by latency. Source: Flux (arXiv
// 2406.06858), section 4.2; its all-to-all in the epilogue.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "comm/comm_tilings.cuh"
#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "common/check.cuh"

namespace bytetx {
namespace {

// Where tiles go: to all staging buffers, to the staging buffer of their rows' owner, to all slots.
enum class To { all, owner, all_slots };

struct Entry {
    LinearTiling tiling;
    void (*launch)(const GemmSumParams&, bool is_for_all, cudaStream_t);
    To to = To::all;
};

constexpr Entry kPushes[] = {
    {{"16x64", 16, 64, true}, gemm::gemm_push_16x64},
    {{"16x128", 16, 128, true}, gemm::gemm_push_16x128},
    {{"32x64", 32, 64, true}, gemm::gemm_push_32x64},
    {{"32x128", 32, 128, true}, gemm::gemm_push_32x128},
    {{"64x64", 64, 64, true}, gemm::gemm_push_64x64},
    {{"64x128", 64, 128, true}, gemm::gemm_push_64x128},
    {{"128x128", 128, 128, true}, gemm::gemm_push_128x128},
    {{"256x64", 256, 64, true}, gemm::gemm_push_256x64},
    {{"dealt-16x64", 16, 64, true}, gemm::gemm_push_16x64, To::owner},
    {{"dealt-16x128", 16, 128, true}, gemm::gemm_push_16x128, To::owner},
    {{"dealt-32x64", 32, 64, true}, gemm::gemm_push_32x64, To::owner},
    {{"dealt-32x128", 32, 128, true}, gemm::gemm_push_32x128, To::owner},
    {{"dealt-64x64", 64, 64, true}, gemm::gemm_push_64x64, To::owner},
    {{"dealt-64x128", 64, 128, true}, gemm::gemm_push_64x128, To::owner},
    {{"dealt-128x128", 128, 128, true}, gemm::gemm_push_128x128, To::owner},
    {{"dealt-256x64", 256, 64, true}, gemm::gemm_push_256x64, To::owner},
    {{"many-128x192", 128, 192, false}, gemm::gemm_scatter_128x192, To::all_slots},
    {{"many-128x128", 128, 128, false}, gemm::gemm_scatter_128x128, To::all_slots},
};

void check_all_reduce(const GemmSumParams& p, To to) {
    constexpr auto kOp = "gemm_all_reduce";
    if (to == To::owner) return comm::check_two_shot(kOp, p);
    const int64_t most_bytes =
        to == To::all_slots ? p.peers.buffer_bytes / 4 : comm::staging_bytes(p.peers);
    comm::check_sum(kOp, p, p.linear.m * p.peers.size, p.linear.m, most_bytes);
}

}  // namespace

int32_t num_gemm_all_reduce_tilings() { return sizeof(kPushes) / sizeof(Entry); }

LinearTiling gemm_all_reduce_tiling(int32_t index) {
    if (index < 0 || index >= num_gemm_all_reduce_tilings()) {
        throw std::invalid_argument("gemm_all_reduce has tilings 0 to " +
                                    std::to_string(num_gemm_all_reduce_tilings() - 1) + ", got " +
                                    std::to_string(index));
    }
    return kPushes[index].tiling;
}

void gemm_reduce_scatter(const GemmSumParams& p, const Launch& launch) {
    const PeerMemory& peers = p.peers;
    int64_t most = 0;
    for (int i = 0; i < std::min(peers.size, kMaxPeers); ++i) {
        most = std::max(most, p.row_offsets[i + 1] - p.row_offsets[i]);
    }
    comm::check_sum("gemm_reduce_scatter", p, most * peers.size,
                    p.row_offsets[peers.rank + 1] - p.row_offsets[peers.rank],
                    peers.buffer_bytes / 4);
    const bool has_sums = p.norm.sum_out && p.norm.residual;  // null where there are no rows
    if (p.adds_parts && (p.linear.residual || (p.norm.total_tokens > 0 && !has_sums))) {
        throw std::invalid_argument(
            "gemm_reduce_scatter: parts are added to a residual into sum_out, without a partial");
    }
    if (p.linear.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (std::string(linear_tiling(p.linear.tiling).name) == "128x128") {
        gemm::gemm_scatter_128x128(p, false, stream);
    } else {
        gemm::gemm_scatter_128x192(p, false, stream);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

void gemm_all_reduce(const GemmSumParams& p, const Launch& launch) {
    gemm_all_reduce_tiling(p.linear.tiling);
    const Entry& entry = kPushes[p.linear.tiling];
    check_all_reduce(p, entry.to);
    if (p.linear.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    entry.launch(p, entry.to != To::owner, stream);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
