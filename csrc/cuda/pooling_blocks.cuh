// The blocks of long sequences: the rows of each, and the sequence of a block by its number.
#pragma once

#include <cstdint>

#include "cuda/pooling_rows.cuh"

namespace bytetx {
namespace {

__device__ __forceinline__ int num_blocks_of(const RowRange& rows) {
    return rows.count > kCtaRows ? (rows.count + kBlockRows - 1) / kBlockRows : 0;
}

__device__ __forceinline__ RowRange block_of(const RowRange& rows, int block) {
    const int64_t num_blocks = num_blocks_of(rows);
    const auto begin = static_cast<int>(block * int64_t{rows.count} / num_blocks);
    const auto end = static_cast<int>((block + 1) * int64_t{rows.count} / num_blocks);
    return {rows.first + begin, end - begin, rows.index + begin};
}

// Blocks of all long sequences are numbered in order. A thread counts those of its share of the
// sequences once, and the CTA then finds any of them by its number.
class BlockFinder {
  public:
    // All threads of the CTA.
    __device__ __forceinline__ explicit BlockFinder(const PoolParams& p) : p_(p) {
        const int64_t share = (p.batch_size + kPoolThreads - 1) / kPoolThreads;
        begin_ = min(threadIdx.x * share, p.batch_size);
        end_ = min(begin_ + share, p.batch_size);
        int64_t count = 0;
        for (int64_t s = begin_; s < end_; s += kAtOnce) count += count_blocks(s);
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
        const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
        int64_t upto = count;
#pragma unroll
        for (int offset = 1; offset < kWarpSize; offset *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, upto, offset);
            if (lane >= offset) upto += other;
        }
        __shared__ int64_t of_warps[kPoolWarps];
        if (lane == kWarpSize - 1) of_warps[warp] = upto;
        __syncthreads();  // every warp's count is written
        total_ = 0;
        for (int i = 0; i < kPoolWarps; ++i) {
            if (i == warp) upto += total_;
            total_ += of_warps[i];
        }
        upto_ = upto;
        before_ = upto - count;
    }

    __device__ __forceinline__ int64_t total() const { return total_; }

    // number < total(). All threads of the CTA; they may write `sequence` and `block` anew after
    // their next barrier.
    __device__ __forceinline__ void find(int64_t number, int& sequence, int& block) const {
        __syncthreads();  // the previous result has been read
        if (before_ <= number && number < upto_) {
            int64_t left = number - before_;
            for (int64_t s = begin_; s < end_; ++s) {
                const int blocks = num_blocks_of(kept_rows(p_, s));
                if (left < blocks) {
                    sequence = static_cast<int>(s);
                    block = static_cast<int>(left);
                    break;
                }
                left -= blocks;
            }
        }
        __syncthreads();  // the result is written
    }

  private:
    static constexpr int kAtOnce = 8;  // sequences whose lengths are on their way together

    __device__ __forceinline__ int64_t count_blocks(int64_t sequence) const {
        int32_t bounds[kAtOnce + 1];
        int32_t skipped[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i <= kAtOnce; ++i) bounds[i] = p_.cu_seqlens[min(sequence + i, end_)];
        if (p_.first_tokens != nullptr) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                skipped[i] = p_.first_tokens[min(sequence + i, end_ - 1)];
            }
        }
        int64_t count = 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool is_mine = sequence + i < end_;
            const RowRange rows = kept_rows(p_, bounds[i], bounds[i + 1], skipped[i]);
            count += is_mine ? num_blocks_of(rows) : 0;
        }
        return count;
    }

    const PoolParams& p_;
    int64_t begin_;  // this thread's sequences
    int64_t end_;
    int64_t before_;  // blocks of the sequences before them
    int64_t upto_;    // and theirs
    int64_t total_;
};

// A sequence of more than kCtaRows rows has fewer than rows / 85 blocks.
__host__ __device__ inline int64_t max_blocks(int64_t total_tokens) { return total_tokens / 85; }

}  // namespace
}  // namespace bytetx
