// The launchers of the fused ops, one a tiling, and the checks that all of them share.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "comm_ops.h"
#include "gemm/tilings.cuh"

namespace bytetx::gemm {

template <typename Tile>
void launch_all_gather_gemm(const AllGatherGemmParams& p, cudaStream_t stream);
template <typename Tile>
void launch_scatter(const GemmSumParams& p, bool to_all_ranks, cudaStream_t stream);
template <typename Tile>
void launch_one_shot(const GemmSumParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm

namespace bytetx::comm {

inline void check(const char* op, const LinearParams& p, const PeerMemory& peers,
                  const RowOffsets& row_offsets) {
    const auto fail = [&](const std::string& need) {
        throw std::invalid_argument(
            std::string(op) + " needs " + need + "; got m, n, k = " + std::to_string(p.m) + ", " +
            std::to_string(p.n) + ", " + std::to_string(p.k) + " on rank " +
            std::to_string(peers.rank) + " of " + std::to_string(peers.size));
    };
    if (peers.size < 1 || peers.size > kMaxPeers) fail("1 to 8 ranks");
    if (peers.rank < 0 || peers.rank >= peers.size) fail("a rank below the number of ranks");
    if (p.m < 0 || p.m > INT32_MAX || p.n <= 0 || p.n > INT32_MAX) fail("0 <= m and 0 < n < 2^31");
    if (p.n % (p.gated ? 64 : 32) != 0) fail("n % 32 == 0 (gated: n % 64 == 0)");
    if (p.k <= 0 || p.k % 8 != 0 || p.k > INT32_MAX) fail("k > 0 and k % 8 == 0");
    if (p.dtype == DType::f32) fail("f16 or bf16");
    if (row_offsets[0] != 0 || row_offsets[peers.size] != p.m) fail("row offsets from 0 to m");
    for (int i = 0; i < peers.size; ++i) {
        if (row_offsets[i] > row_offsets[i + 1]) fail("row offsets that do not fall");
    }
}

// Columns of the tiling of an op that takes linear()'s 128x128 and 128x192.
inline int tile_columns(const char* op, const LinearParams& p) {
    const LinearTiling tiling = linear_tiling(p.tiling);
    const bool is_taken = !tiling.is_small_m && tiling.rows == 128;
    if (!is_taken || (tiling.columns != 128 && tiling.columns != 192)) {
        throw std::invalid_argument(std::string(op) +
                                    " takes the tilings 128x128 and 128x192, got " + tiling.name);
    }
    return tiling.columns;
}

// For ops that sum partial products: slot_rows must fit most_bytes, and `rows` are summed here.
inline void check_sum(const char* op, const GemmSumParams& p, int64_t slot_rows, int64_t rows,
                      int64_t most_bytes) {
    const LinearParams& o = p.linear;
    check(op, o, p.peers, p.row_offsets);
    if (o.bias || o.gated || o.activation != Activation::none) {
        throw std::invalid_argument(std::string(op) + ": the product takes no bias, no activation");
    }
    if (p.norm.total_tokens != rows || p.norm.hidden_size != o.n || p.norm.out_fp8) {
        throw std::invalid_argument(std::string(op) + ": the norm must have the sum's rows, " +
                                    std::to_string(rows) + " of " + std::to_string(o.n));
    }
    if (slot_rows * o.n * 2 > most_bytes) {
        throw std::invalid_argument(std::string(op) + ": " + std::to_string(slot_rows) +
                                    " rows of slots do not fit the workspace");
    }
}

}  // namespace bytetx::comm
