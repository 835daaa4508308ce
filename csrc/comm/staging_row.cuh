// How threads read a row that arrives in the staging buffer: shared by sum_staging.cu and
// two_shot.cu.
#pragma once

#include "comm/sum_parts.cuh"

namespace bytetx::comm {

// Bypasses L1, which may have the data of an earlier call.
__device__ __forceinline__ uint4 load_coherent(const uint4* at) {
    uint4 words;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at)
                 : "memory");
    return words;
}

// All threads of a row.
template <typename Tiling>
__device__ __forceinline__ void sync_row() {
    if constexpr (Tiling::kThreadsPerRow > kWarpSize) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

// Like RowParameter, but reloaded for each row instead of kept in registers.
class ReloadedParameter {
  public:
    __device__ __forceinline__ ReloadedParameter(const void* values, int, int)
        : values_(static_cast<const uint4*>(values)) {}

    __device__ __forceinline__ uint4 get(int, int v) const {
        if (values_ == nullptr) return {};
        const uint4* at = values_ + v;
        asm volatile("" : "+l"(at));
        return __ldg(at);
    }

  private:
    const uint4* values_;
};

// Reads a row of this rank's staging buffer; returns whether all of the thread's words have
// arrived.
template <typename Tiling>
__device__ __forceinline__ bool peek(RawRow<Tiling>& part, const uint4* first, int lane,
                                     int num_vecs) {
    bool is_whole = true;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = i * Tiling::kThreadsPerRow;
        if (lane + v >= num_vecs) continue;
        part.words[i] = load_relaxed(first + v);
        is_whole = is_whole && has_arrived(part.words[i]);
    }
    return is_whole;
}

// Waits until all of the thread's words of a row have arrived, or the host has given up.
template <typename Tiling>
__device__ __forceinline__ void wait_for_row(const Peers& peers, int source, RawRow<Tiling>& part,
                                             bool is_whole, const uint4* first, int lane,
                                             int num_vecs) {
    WaitTimer timer;
    while (!is_whole) {
        const auto* at = reinterpret_cast<const uint32_t*>(first);
        if (timer.is_over(peers, source, at, 0, 1)) break;
        is_whole = peek<Tiling>(part, first, lane, num_vecs);
    }
}

// Zeroes the row for the call after the next.
template <typename Tiling>
__device__ __forceinline__ void clear_staging(uint4* first, int lane, int num_vecs) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = i * Tiling::kThreadsPerRow;
        if (lane + v < num_vecs) first[v] = uint4{};
    }
}

// One thread: waits until a word of `source` has arrived.
__device__ __forceinline__ void wait_for_word(const Peers& peers, int source, const uint4* word) {
    const auto* at = reinterpret_cast<const uint32_t*>(word);
    WaitTimer timer;
    while (load_acquire(at) == 0 && !timer.is_over(peers, source, at, 0, 1)) {
    }
}

}  // namespace bytetx::comm
