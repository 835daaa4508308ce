// What becomes of partial sums that all ranks have put into this one's slots or staging buffer: see
// sum_rows.cu and sum_staging.cu.
#pragma once

#include <cuda_runtime.h>

#include "comm_ops.h"

namespace bytetx::comm {

// Rows of this rank and the tiles in which they come, if not into the staging buffer.
struct SumShape {
    const void* parts = nullptr;        // all ranks' parts, which are there; or null: in slots
    int first_row = 0, num_rows = 0;    // of all rows
    int first_tile = 0, num_tiles = 0;  // those that hold these rows, counted from row 0
    int tile_rows = 1;
    int count_of_tile = 0;  // what a source counts for one of them in all
    // Rows, counted from first_row, whose sums this rank's tiles put into norm.sum_out.
    int first_summed = 0, end_summed = 0;
};

// CTAs of a kernel that sends rows to other ranks: enough for the links (8 reach 300 GB/s, all
// 310), and few, for on their SMs loads of the sum's CTAs wait behind these stores. Clusters of
// them are spread over the GPCs; CTAs without one begin on SMs that no cluster fits, eight of one
// GPC.
constexpr int kSendingCtas = 24, kSendingCluster = 4;

// Behind the kernel that fills the slots, which has let this one start.
void launch_sum(const GemmSumParams& p, const SumShape& shape, cudaStream_t stream);

// The same of all rows, from the staging buffer. own_part: this rank's, where it is not there; or
// null.
void launch_sum_staging(const GemmSumParams& p, const void* own_part, cudaStream_t stream);

// The same where staging buffers hold parts of their ranks' own rows: sums go to all, who norm
// them.
void launch_two_shot(const GemmSumParams& p, const void* own_part, cudaStream_t stream);
void check_two_shot(const char* op, const GemmSumParams& p);

// Rows of a block that one rank sums for all; the last ranks may have fewer.
inline int64_t rows_of_owner(int64_t num_rows, int64_t size) {
    return (num_rows + size - 1) / size;
}

}  // namespace bytetx::comm
