// gemm_reduce_scatter and gemm_all_reduce: a linear layer whose input features are split over the
// ranks, the sum of the ranks' products, and the norm after it.
//
//   h = sum over ranks (a b^T + partial) + bias + residual;  out = norm(h)
//
// gemm_reduce_scatter: scatter_epilogue.cuh stores each tile to the owner of its rows, sum_rows.cu
// sums; with a fused reduce, fused_reduce.cuh's last tiles sum, and sum_rows.cu only
// normalizes.
// gemm_all_reduce, small m: one_shot_epilogue.cuh stores tiles to the staging buffers of all ranks
// (one exchange), or of the owner of their rows (two exchanges, two_shot.cu). Large m:
// scatter_epilogue.cuh stores tiles to the slots of all ranks.
// gemm_reduce_scatter is bound by the tensor cores where k / tp_size is large (about 1500 to 2000
// features at tp 8), by NVLink below; gemm_all_reduce by the bytes of the weights and by latency.
// Source: Flux (arXiv 2406.06858), section 4.2: the all-to-all in the epilogue.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "comm/comm_tilings.cuh"
#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "common/check.cuh"
#include "gemm/launchers.h"

namespace bytetx {
namespace {

template <typename Tile>
void scatter_to_all(const GemmSumParams& p, cudaStream_t stream) {
    gemm::launch_scatter<Tile>(p, true, stream);
}

struct Entry {
    LinearTiling tiling;
    void (*launch)(const GemmSumParams&, cudaStream_t);
};

// A one-shot tiling's rows of 64 are columns of d.
template <typename Tile>
constexpr Entry one_shot(const char* name) {
    return {{name, Tile::kTileN, 64 * Tile::kRowBlocks, true}, gemm::launch_one_shot<Tile>};
}

template <typename Tile>
constexpr Entry scatter(const char* name) {
    return {gemm::tiling_of<Tile>(name, false), scatter_to_all<Tile>};
}

constexpr Entry kAllReduceTilings[] = {
    one_shot<gemm::OneShot16x64>("16x64"),     one_shot<gemm::OneShot16x128>("16x128"),
    one_shot<gemm::OneShot32x64>("32x64"),     one_shot<gemm::OneShot32x128>("32x128"),
    one_shot<gemm::OneShot64x64>("64x64"),     one_shot<gemm::OneShot64x128>("64x128"),
    one_shot<gemm::OneShot128x128>("128x128"), one_shot<gemm::OneShot256x64>("256x64"),
    scatter<gemm::Tile128x192>("128x192"),     scatter<gemm::CommTile128x128>("128x128"),
};

void check_all_reduce(const GemmSumParams& p, const LinearTiling& tiling) {
    constexpr auto kOp = "gemm_all_reduce";
    if (p.is_two_shot) {
        if (!tiling.is_small_m) {
            throw std::invalid_argument(
                "gemm_all_reduce: two exchanges need a tiling for small m, got the large " +
                std::string(tiling.name));
        }
        return comm::check_two_shot(kOp, p);
    }
    const int64_t most_bytes =
        tiling.is_small_m ? comm::staging_bytes(p.peers) : p.peers.buffer_bytes / 4;
    comm::check_sum(kOp, p, p.linear.m * p.peers.size, p.linear.m, most_bytes);
}

}  // namespace

int32_t num_gemm_all_reduce_tilings() { return sizeof(kAllReduceTilings) / sizeof(Entry); }

LinearTiling gemm_all_reduce_tiling(int32_t index) {
    if (index < 0 || index >= num_gemm_all_reduce_tilings()) {
        throw std::invalid_argument("gemm_all_reduce has tilings 0 to " +
                                    std::to_string(num_gemm_all_reduce_tilings() - 1) + ", got " +
                                    std::to_string(index));
    }
    return kAllReduceTilings[index].tiling;
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
    if (p.fuse_reduce && (p.linear.residual || (p.norm.total_tokens > 0 && !has_sums))) {
        throw std::invalid_argument(
            "gemm_reduce_scatter: a fused reduce needs residual and sum_out, and takes no partial");
    }
    const int columns = comm::tile_columns("gemm_reduce_scatter", p.linear);
    if (p.linear.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (columns == 128) {
        gemm::launch_scatter<gemm::CommTile128x128>(p, false, stream);
    } else {
        gemm::launch_scatter<gemm::Tile128x192>(p, false, stream);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

void gemm_all_reduce(const GemmSumParams& p, const Launch& launch) {
    const LinearTiling tiling = gemm_all_reduce_tiling(p.linear.tiling);
    check_all_reduce(p, tiling);
    if (p.linear.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    kAllReduceTilings[p.linear.tiling].launch(p, stream);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
