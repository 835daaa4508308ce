// What becomes of partial sums that all ranks have put into this one's slots or inbox: see
// sum_rows.cu.
#pragma once

#include <cuda_runtime.h>

#include "comm_ops.h"

namespace bytetx::comm {

// Rows of this rank and the tiles in which they come, if not into the inbox.
struct SumShape {
    bool is_in_inbox;
    int first_row, num_rows;    // of all rows
    int first_tile, num_tiles;  // those that hold these rows, counted from row 0
    int tile_rows;
    int count_of_tile;  // what a source counts for one of them in all
};

// Behind the kernel that fills the slots, which has let this one start.
void launch_sum(const GemmSumParams& p, const SumShape& shape, cudaStream_t stream);

}  // namespace bytetx::comm
