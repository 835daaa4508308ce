// A ring of rows in shared memory: one warp of the CTA fills it by bulk copies, the other threads
// sum them. Used by sum_rows.cu.
#pragma once

#include <algorithm>

#include "comm/sum_parts.cuh"
#include "common/ptx.cuh"
#include "common/ring.cuh"

namespace bytetx::comm {

constexpr int kMostSlots = 16;

// CTAs of an SM, as many as its registers hold: a row of a few kilobytes takes less time than the
// barriers of one CTA. They share the SM's memory for rings.
template <typename Tiling>
constexpr int kCtasOfSm = Tiling::kThreadsPerRow <= kWarpSize ? 3
                          : Tiling::kVecsPerThread == 1       ? 5
                          : Tiling::kVecsPerThread == 2       ? 3
                                                              : 1;
template <typename Tiling>
constexpr int kRingBytes = (208 / kCtasOfSm<Tiling> - 4) * 1024;
template <typename Tiling>
constexpr int kRingThreads = Tiling::kCtaThreads + kWarpSize;

struct RingSumParams : SumParams {
    int num_slots,
        slot_bytes;  // ring slots: a row of one array for each row that a CTA sums at once
};

struct Ring {
    uint8_t* slots;
    uint64_t *full, *empty;
};

// Initializes the CTA's ring; its threads see it after their next barrier.
template <typename Tiling>
__device__ __forceinline__ Ring make_ring(const RingSumParams& p) {
    extern __shared__ __align__(128) uint8_t ring_slots[];
    __shared__ uint64_t full[kMostSlots], empty[kMostSlots];
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.num_slots; ++i) {
            FullBarrier::init(&full[i], 1);
            EmptyBarrier::init(&empty[i], Tiling::kCtaThreads / kWarpSize);
        }
        fence_barrier_init();
    }
    return {ring_slots, full, empty};
}

// One warp: fetches rows, array by array.
class RingFetcher {
  public:
    __device__ __forceinline__ RingFetcher(const RingSumParams& p, const Ring& ring)
        : p_(p), ring_(ring), slot_{p.num_slots} {}

    // Fetches `count` rows of an array, from `first` on.
    __device__ __forceinline__ void fetch(const void* rows, int64_t first, int count) {
        if (threadIdx.x % kWarpSize == 0) {
            const int64_t row_bytes = p_.norm.hidden_size * 2;
            const auto bytes = static_cast<uint32_t>(count * row_bytes);
            EmptyBarrier::wait(&ring_.empty[slot_.index], slot_.phase ^ 1);
            FullBarrier::arrive_and_expect(&ring_.full[slot_.index], bytes);
            load_bytes(static_cast<const uint8_t*>(rows) + first * row_bytes,
                       &ring_.full[slot_.index], ring_.slots + slot_.index * p_.slot_bytes,
                       static_cast<int32_t>(bytes));
        }
        slot_.advance();
    }

  private:
    const RingSumParams& p_;
    const Ring& ring_;
    AnyRingIndex slot_;
};

// Takes the next array's row; all threads of the CTA but the fetching warp.
template <typename Tiling>
__device__ __forceinline__ RawRow<Tiling> take_slot(const RingSumParams& p, const Ring& ring,
                                                    AnyRingIndex& slot, int lane, int num_vecs) {
    const int place = static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
    const auto* row =
        reinterpret_cast<const uint4*>(ring.slots + slot.index * p.slot_bytes) + place * num_vecs;
    FullBarrier::wait(&ring.full[slot.index], slot.phase);
    RawRow<Tiling> words;
    words.load(row, 0, lane, num_vecs, [](const uint4* at) { return *at; });
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) EmptyBarrier::arrive(&ring.empty[slot.index]);
    slot.advance();
    return words;
}

// h = the residual's next row, if there is a residual, + bias + the next rows of all ranks' parts.
// If the row is summed already: h = the next row.
template <typename T, typename Tiling, typename Parameter>
__device__ __forceinline__ void add_slots(const RingSumParams& p, const Ring& ring,
                                          const Parameter& bias, AnyRingIndex& slot, int lane,
                                          int num_vecs, bool is_summed,
                                          RowRegisters<T, Tiling>& h) {
    const auto add_next = [&] {
        add_row<T, Tiling>(h, take_slot<Tiling>(p, ring, slot, lane, num_vecs));
    };
    clear_row<T, Tiling>(h);
    if (!is_summed) {
        if (p.norm.residual != nullptr) add_next();
        add_parameter<T, Tiling>(h, bias, lane, num_vecs);
    }
    const int num_parts = is_summed ? 1 : p.peers.size;
#pragma unroll 1
    for (int source = 0; source < num_parts; ++source) add_next();
}

// num_ctas: the number that there is work for.
template <typename T, typename Tiling, auto kKernel, typename P>
void launch_ring(P p, int64_t num_ctas, cudaStream_t stream) {
    constexpr int kBytes = kRingBytes<Tiling>;
    allow_smem_once<kKernel>(kBytes);
    p.slot_bytes = static_cast<int>(Tiling::kRowsPerCta * p.norm.hidden_size * sizeof(T));
    p.num_slots = std::min(kMostSlots, kBytes / p.slot_bytes);
    int device;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    static const int64_t resident = resident_ctas(kKernel, kRingThreads<Tiling>, kBytes, device);
    // At least one CTA: a rank without rows counts its calls, too.
    const auto grid = static_cast<unsigned>(std::clamp<int64_t>(num_ctas, 1, resident));
    launch_kernel(kKernel, {dim3(grid), dim3(kRingThreads<Tiling>), kBytes, stream}, p);
}

inline void check_counters(const SumParams& p, int64_t num_flags) {
    if (p.shape.num_tiles > p.peers.counters_of_source) {
        throw std::invalid_argument("a sum over ranks of this many rows needs more flags than " +
                                    std::to_string(num_flags));
    }
}

}  // namespace bytetx::comm
