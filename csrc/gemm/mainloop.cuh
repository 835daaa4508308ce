// The main loop: a warpgroup multiplies the stages of a ring.
#pragma once

#include "gemm/ring.cuh"

namespace bytetx::gemm {

// sums += rows of a times rows of b over `num_blocks` stages; `ring` is at the first of them and
// ends behind the last. on_last() is called when all have been seen full. a_offset: elements of a
// stage of a before the warpgroup's.
template <typename C, typename S, typename Index, typename OnLast>
__device__ __forceinline__ void multiply(S& s, int num_blocks, Index& ring,
                                         typename C::Accumulators& sums, OnLast&& on_last,
                                         int a_offset) {
    constexpr int kRowBytes = kBlockK * kElementBytes, kGroupStep = 8 * kRowBytes / 16;
    constexpr int kFeatureBytes = 32;  // bytes of a row that one wgmma reads
    const auto multiply_stage = [&] {
        FullBarrier::wait(&s.ring.full[ring.index], ring.phase);
        const Operand a = operand_at<kRowBytes>(s.stages.a(ring.index) + a_offset, kGroupStep);
        const Operand b = operand_at<kRowBytes>(s.stages.b(ring.index), kGroupStep);
        begin_products();
#pragma unroll
        for (int step = 0; step < kRowBytes / kFeatureBytes; ++step) {
#pragma unroll
            for (int rows = 0; rows < C::kRowBlocks; ++rows) {
                multiply_add<typename C::Factor, C::kTileN>(
                    sums.x + rows * (C::kTileN / 2),
                    a + (rows * 8 * kGroupStep + step * (kFeatureBytes / 16)),
                    b + step * (kFeatureBytes / 16), 1);
            }
        }
        commit_products();
    };
    sums.pin();
    int previous = ring.index;
    multiply_stage();
    ring.advance();
    for (int block = 1; block < num_blocks; ++block) {
        multiply_stage();
        wait_for_products<1>();  // the block before is done with its stage
        release_stage<C>(s, previous);
        previous = ring.index;
        ring.advance();
    }
    on_last();
    wait_for_products<0>();
    sums.pin();
    release_stage<C>(s, previous);
}

}  // namespace bytetx::gemm
