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
    using namespace cute;
    typename C::Mma mma;
    auto thread = mma.get_thread_slice(static_cast<int>(threadIdx.x) % kWarpgroupThreads);
    mma.accumulate_ = GMMA::ScaleOut::One;
    const auto multiply_stage = [&] {
        FullBarrier::wait(&s.ring.full[ring.index], ring.phase);
        Tensor a_tile = make_tensor(make_smem_ptr(C::operand(s.stages.a(ring.index)) + a_offset),
                                    typename C::LayoutA{});
        Tensor b_tile =
            make_tensor(make_smem_ptr(C::operand(s.stages.b(ring.index))), typename C::LayoutB{});
        Tensor a = thread.partition_fragment_A(a_tile);
        Tensor b = thread.partition_fragment_B(b_tile);
        warpgroup_arrive();
        cute::gemm(mma, a, b, sums);
        warpgroup_commit_batch();
    };
    warpgroup_fence_operand(sums);
    int previous = ring.index;
    multiply_stage();
    ring.advance();
    for (int block = 1; block < num_blocks; ++block) {
        multiply_stage();
        warpgroup_wait<1>();  // the block before is done with its stage
        release_stage<C>(s, previous);
        previous = ring.index;
        ring.advance();
    }
    on_last();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release_stage<C>(s, previous);
}

}  // namespace bytetx::gemm
