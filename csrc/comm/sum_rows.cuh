// The kernels that sum the partial sums of all ranks: see sum_rows.cu and sum_staging.cu.
#pragma once

#include <cuda_runtime.h>

#include "comm_ops.h"

namespace bytetx::comm {

// Rows of this rank and the tiles in which they arrive, unless they are in the staging buffer.
struct SumShape {
    const void* parts = nullptr;        // all ranks' parts, complete; or null: in slots
    int first_row = 0, num_rows = 0;    // range among all rows
    int first_tile = 0, num_tiles = 0;  // that contain these rows, counted from row 0
    int tile_rows = 1;
    int count_of_tile = 0;  // total that a source counts for one of them
    // Rows, counted from first_row, whose sums this rank's tiles have stored in norm.sum_out.
    int first_summed = 0, end_summed = 0;
};

// CTAs of a kernel that sends rows to other ranks: enough for the links (8 reach 300 GB/s, 24 reach
// 310), and few, because on their SMs loads of the sum's CTAs wait behind these stores. Clusters
// spread them over the GPCs; without clusters, eight of them start in one GPC.
constexpr int kSendingCtas = 24, kSendingCluster = 4;

// After the kernel that fills the slots, which has released this one.
void launch_sum(const GemmSumParams& p, const SumShape& shape, cudaStream_t stream);

// The same for all rows, from the staging buffer. own_part: this rank's part where it is not in the
// staging buffer; else null.
void launch_sum_staging(const GemmSumParams& p, const void* own_part, cudaStream_t stream);

// The same where staging buffers hold the parts of the rows that their rank owns: the owner sends
// the sums to all ranks, and each rank normalizes all rows.
void launch_two_shot(const GemmSumParams& p, const void* own_part, cudaStream_t stream);
void check_two_shot(const char* op, const GemmSumParams& p);

// Rows that one rank sums for all; the last ranks may have fewer.
inline int64_t rows_of_owner(int64_t num_rows, int64_t size) {
    return (num_rows + size - 1) / size;
}

}  // namespace bytetx::comm
