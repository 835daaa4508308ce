// The ring of stages between the thread that fetches operands and the warpgroups that multiply
// them.
#pragma once

#include "common/ring.cuh"
#include "gemm/config.cuh"

namespace bytetx::gemm {

// As many stages as the tiling says.
template <typename C>
struct StaticStages {
    struct Size {};
    using Index = RingIndex<C::kStages>;

    alignas(1024) typename C::Element a_stages[C::kStages][C::kAElements];
    alignas(1024) typename C::Element b_stages[C::kStages][C::kBElements];

    __device__ __forceinline__ typename C::Element* a(int stage) { return a_stages[stage]; }
    __device__ __forceinline__ typename C::Element* b(int stage) { return b_stages[stage]; }

    static __device__ __forceinline__ Index first(const Size&) { return {}; }
    static __device__ __forceinline__ int num_stages(const Size&) { return C::kStages; }
    static __device__ __forceinline__ int stage_bytes(const Size&) { return C::kStageBytes; }
};

// As many stages as the launch says, at most C::kStages. They lie kHeadBytes behind the first byte
// of shared memory, which is this struct's; barriers are between. What is behind the stages belongs
// to the epilogue.
template <typename C>
struct LaunchStages {
    // Rows of a tile that m does not have are not fetched: as zeros they would take as long as rows
    // that are there. What shared memory holds in their place stays in rows that are not stored.
    struct Size {
        int num_stages;
        int stage_bytes;  // that a stage gets
    };
    using Index = AnyRingIndex;
    static constexpr int kHeadBytes = 1024;

    __device__ __forceinline__ typename C::Element* a(int stage) {
        return reinterpret_cast<typename C::Element*>(stage_at(stage));
    }
    __device__ __forceinline__ typename C::Element* b(int stage) {
        return a(stage) + C::kAElements;
    }
    __device__ __forceinline__ uint8_t* behind(const Size& size) {
        return stage_at(size.num_stages);
    }

    static __device__ __forceinline__ Index first(const Size& size) { return {size.num_stages}; }
    static __device__ __forceinline__ int num_stages(const Size& size) { return size.num_stages; }
    static __device__ __forceinline__ int stage_bytes(const Size& size) { return size.stage_bytes; }

  private:
    __device__ __forceinline__ uint8_t* stage_at(int stage) {
        return reinterpret_cast<uint8_t*>(this) + kHeadBytes + stage * C::kStageBytes;
    }
};

template <typename C>
struct RingBarriers {
    uint64_t full[C::kStages], empty[C::kStages];
    uint64_t order[C::kConsumers];  // the other warpgroup has taken all its stages
};

// Arrives, once a warp, at every CTA that writes to this stage of this CTA.
template <typename C, typename S>
__device__ __forceinline__ void release_stage(S& s, int stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (C::kClusterCtas == 1) {
        if (lane == 0) EmptyBarrier::arrive(&s.ring.empty[stage]);
    } else {
        if (lane < C::kClusterCtas) EmptyBarrier::arrive_at(&s.ring.empty[stage], lane);
    }
}

// One thread; a fence follows.
template <typename C, typename P, typename S>
__device__ __forceinline__ void init_ring(const P& p, S& s) {
    // Warps, over all CTAs that a fetch reaches.
    constexpr int kReaders = 4 * C::kTogether * C::kClusterCtas;
    for (int i = 0; i < s.stages.num_stages(p.stages); ++i) {
        FullBarrier::init(&s.ring.full[i], 1);
        EmptyBarrier::init(&s.ring.empty[i], kReaders);
    }
    if constexpr (C::kConsumers > 1) {
        for (int i = 0; i < C::kConsumers; ++i) EmptyBarrier::init(&s.ring.order[i], 4);
    }
}

}  // namespace bytetx::gemm
