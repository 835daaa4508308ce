// The launchers of the GEMMs of one GPU: one instance a tiling, compiled in a file of its own.
#pragma once

#include <cuda_runtime.h>

#include "linear_norm_ops.h"
#include "ops.h"

namespace bytetx::gemm {

template <typename Tile>
void launch_linear(const LinearParams& p, cudaStream_t stream);
template <typename Tile>
void launch_fp8_linear(const Fp8LinearParams& p, cudaStream_t stream);
template <typename Tile>
void launch_linear_norm(const LinearNormParams& p, cudaStream_t stream);

// A tiling by the rows and columns of d.
template <typename Tile>
constexpr LinearTiling tiling_of(const char* name, bool is_small_m) {
    return {name, 64 * Tile::kRowBlocks * Tile::kTogether, Tile::kTileN, is_small_m};
}

}  // namespace bytetx::gemm
