// The GEMM kernel: one warp-specialised body for every GEMM of this package.
//
//   d = epilogue(a b^T)           a [m, k], b [n, k]; f16, bf16 or E4M3; f32 accumulation
//
// gemm_kernel<Config, Scheduler, Producer, Epilogue>:
//   Config     types, tile, stages, registers                                  gemm/config.cuh
//   Scheduler  which tiles a CTA works on, and over which features             gemm/schedulers.cuh
//   Producer   what the warps do that do not multiply: they bring operands     gemm/producers.cuh
//   Epilogue   what a warpgroup does before and behind a tile's products       gemm/epilogue.cuh
//
// The last warpgroup (tilings for small m: the last warp) is the producer. The others multiply:
// they begin a tile's accumulators, run the main loop over the ring of stages, and finish the tile.
// Persistent kernels have two such warpgroups, which take tiles in turn (ping-pong), so that one's
// epilogue runs under the other's products. What each GEMM of the package is made of, what bounds
// it and how to add an epilogue: docs/kernels/linear.md.
#pragma once

#include "common/launch.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/mainloop.cuh"
#include "gemm/producers.cuh"
#include "gemm/schedulers.cuh"

namespace bytetx::gemm {

template <typename C, typename Producer, typename Epilogue>
struct Smem {
    typename C::template Stages<C> stages;  // first: aligned to 1024 bytes
    RingBarriers<C> ring;
    typename Producer::Smem producer;
    typename Epilogue::Smem epilogue;
};

// Parameters of a kernel.
template <typename C, typename Scheduler, typename Producer, typename Epilogue>
struct Params : Problem {
    typename C::template Stages<C>::Size stages;
    typename Scheduler::Inputs scheduler;
    typename Producer::Inputs producer;
    typename Epilogue::Inputs epilogue;
};

// Arguments of the parts of a kernel.
template <typename P, typename S, typename At>
struct Context {
    const P& p;    // Params
    S& s;          // Smem
    const At& at;  // the scheduler
};

template <typename C, typename Producer, typename Epilogue, typename K>
__device__ __forceinline__ void init_barriers(const K& k) {
    if (threadIdx.x == 0) {
        init_ring<C>(k.p, k.s);
        Producer::init_barriers(k);
        Epilogue::init_barriers(k);
        fence_barrier_init();
    }
    k.at.sync_start();
}

// The warpgroups that multiply; own_group: their number. wait(): before the first access to what a
// kernel may have written.
template <typename C, typename Epilogue, typename K, typename Wait>
__device__ __forceinline__ void consume(const K& k, int own_group, const Wait& wait) {
    auto& [p, s, at] = k;
    constexpr bool kTakesTurns = C::kConsumers > 1;
    // Said again, it saves the main loop of some instances an instruction.
    const int group = kTakesTurns ? uniform(own_group) : own_group;
    const Share blocks = at.k_blocks();
    const int num_blocks = blocks.end - blocks.begin;
    auto ring = s.stages.first(p.stages);
    uint32_t order_phase = 1 ^ group;  // the first warpgroup does not wait for its first tile
    typename C::Accumulators sums;
    int first = at.cluster, round = 0;
    if constexpr (kTakesTurns) {
        if (group > 0) {  // the other warpgroup's first tile
            first += at.num_clusters;
            ring.advance(num_blocks);
        }
    }
    const int row = C::kTogether > 1 ? group * C::kWarpgroupM : 0;  // first row within the tile
    for (int tile = first; at.has(tile); tile += C::kConsumers * at.num_clusters) {
        Epilogue epilogue(k, at.tile_m(tile) + row, at.tile_n(tile), round++);
        epilogue.begin(sums, wait);
        if constexpr (kTakesTurns) {
            // A stage's barrier tells odd fills from even ones, no more: whoever runs ahead of the
            // other warpgroup would take an older fill for its own.
            EmptyBarrier::wait(&s.ring.order[group], order_phase);
            order_phase ^= 1;
        }
        const auto on_last = [&] {
            if constexpr (kTakesTurns) {
                if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.ring.order[group ^ 1]);
            }
        };
        multiply<C>(s, num_blocks, ring, sums, on_last, row * kBlockK);
        if constexpr (kTakesTurns) ring.advance(num_blocks);
        epilogue.finish(sums);
        if constexpr (!std::decay_t<decltype(at)>::kIsPersistent) break;
    }
}

template <typename C, typename Scheduler, typename Producer, typename Epilogue>
__global__ void __launch_bounds__(C::kThreads, C::kCtasOfSm)
    gemm_kernel(const __grid_constant__ Params<C, Scheduler, Producer, Epilogue> p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<Smem<C, Producer, Epilogue>*>(smem);
    const Scheduler at(p, p.scheduler);
    const Context<decltype(p), decltype(s), Scheduler> k{p, s, at};
    constexpr bool kWaitsFirst = Producer::kWaitsFirst || Epilogue::kWaitsFirst;
    Epilogue::load_parameters(k);
    init_barriers<C, Producer, Epilogue>(k);
    // The barrier of sync_start() orders no stores.
    if constexpr (Epilogue::kHasParameters) __syncthreads();
    if constexpr (!Epilogue::kReleasesLate) release_next_kernel();
    const auto wait = [] {
        wait_for_prior_kernel();
        if constexpr (Epilogue::kReleasesLate) release_next_kernel();
    };
    const auto has_waited = [] {};
    if constexpr (kWaitsFirst) wait();
    const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    if (group == C::kConsumers * C::kTogether) {
        if constexpr (C::kProducerRegisters > 0) {
            give_registers<C::kProducerRegisters>();
        }
        Producer::run(k, static_cast<int>(threadIdx.x) % kWarpgroupThreads);
        at.end_producer();
        if constexpr (Scheduler::kProducerReturns) return;
    } else {
        if constexpr (C::kConsumerRegisters > 0) {
            take_registers<C::kConsumerRegisters>();
        }
        if constexpr (kWaitsFirst) {
            Epilogue::before_tiles(k);
            consume<C, Epilogue>(k, group, has_waited);
        } else if constexpr (Scheduler::kIsPersistent) {  // once, not in every tile
            wait();
            consume<C, Epilogue>(k, group, has_waited);
        } else {
            consume<C, Epilogue>(k, group, wait);
        }
    }
    __syncwarp();
    at.sync_end();
    Producer::end(k);
}

}  // namespace bytetx::gemm
