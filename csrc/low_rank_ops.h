// Changes of low rank to the rows of a product: the part of ops.h that only cuda implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// cuda only. out = residual + x a^T b^T + bias of a tile's owner, for each tile of at most 16 rows.
struct LowRankParams {
    const void* x;            // [m, k], dtype, contiguous and 16-byte aligned
    const void* residual;     // [m, n] with rows 16-byte aligned, or null
    int64_t residual_stride;  // elements from row to row
    void* out;                // [m, n], contiguous and 16-byte aligned
    const int32_t* rows;      // row numbers
    const int32_t* tiles;  // [num_tiles, 3]: first in rows, how many, owner or -1; empty ones last
    const int64_t* addresses;  // [num_owners, 4]: of a [rank, k] and b [n, rank], the rank, of a
                               // bias [n] or 0; each 16-byte aligned
    const int32_t* ranges;  // [num_owners, ceil(n / 128), 2]: first and end of the ranks used there
    int64_t num_tiles;
    int64_t n;         // a multiple of 8
    int64_t k;         // a multiple of 8
    int64_t max_rank;  // at most 256
    DType dtype;       // f16 or bf16
};

void low_rank(const LowRankParams& p, const Launch& launch);

}  // namespace bytetx
