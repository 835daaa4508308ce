// A row that comes into the staging buffer, as threads of its reader take it: what sum_staging.cu
// and two_shot.cu share.
#pragma once

#include "comm/sum_parts.cuh"

namespace bytetx::comm {

// Past L1, which may hold what lay there in an earlier call.
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

// As RowParameter, of which the compiler keeps nothing from row to row.
class ParameterReadAgain {
  public:
    __device__ __forceinline__ ParameterReadAgain(const void* values, int, int)
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

// A row in this rank's staging buffer: what has come of it.
template <typename Tiling>
__device__ __forceinline__ bool peek(RawRow<Tiling>& part, const uint4* first, int lane,
                                     int num_vecs) {
    bool is_whole = true;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = i * Tiling::kThreadsPerRow;
        if (lane + v >= num_vecs) continue;
        part.words[i] = load_relaxed(first + v);
        is_whole = is_whole && has_come(part.words[i]);
    }
    return is_whole;
}

// Until all of the row that a thread has peeked at has come; or the host has given up.
template <typename Tiling>
__device__ __forceinline__ void wait_for_row(const Peers& peers, int source, RawRow<Tiling>& part,
                                             bool is_whole, const uint4* first, int lane,
                                             int num_vecs) {
    Patience patience;
    while (!is_whole) {
        const auto* at = reinterpret_cast<const uint32_t*>(first);
        if (patience.has_ended(peers, source, at, 0, 1)) break;
        is_whole = peek<Tiling>(part, first, lane, num_vecs);
    }
}

// For the next call but one.
template <typename Tiling>
__device__ __forceinline__ void clear_inbox(uint4* first, int lane, int num_vecs) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = i * Tiling::kThreadsPerRow;
        if (lane + v < num_vecs) first[v] = uint4{};
    }
}

// One thread: until a word of `source` has come.
__device__ __forceinline__ void wait_for_word(const Peers& peers, int source, const uint4* word) {
    const auto* at = reinterpret_cast<const uint32_t*>(word);
    Patience patience;
    while (load_acquire(at) == 0 && !patience.has_ended(peers, source, at, 0, 1)) {
    }
}

}  // namespace bytetx::comm
