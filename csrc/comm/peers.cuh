// Memory that the GPUs of a group write to each other: its layout, and how a kernel waits for it.
//
// Every rank owns a buffer and flag words that all others can write.
// - The buffer has four quarters: gathered rows for odd and for even calls, and slots of partial
//   sums for odd and for even calls.
// - A call has a number, its epoch, in device memory. The call's last CTA increments it, so that a
//   captured graph can be replayed. All ranks make the same calls in the same order, so their
//   epochs agree.
// - Arrivals are counted: the writer of a piece of data adds one to its counter on the rank that
//   reads it. The reader resets its counters to zero when it has read the data (at the end of an
//   all_gather_gemm, or at the start of the next sum) and announces that it has begun the next call
//   (kStarted, kSumStarted). No rank writes to a quarter, or counts for it, before that.
// - Partial sums of up to some hundred rows, and sums that their owner sends to all, go to a
// staging
//   buffer behind the flags, one for odd and one for even calls, and are not counted: a word of
//   them is never zero, and the buffer is zero until it arrives. So no rank waits for all of it,
//   and no fence stands between a word and the signal of its arrival. The reader zeroes it again.
// - Copy engines write to a region of their own. Here are only the flags that say that copies have
//   arrived (kArrived), and that all ranks have read the copies of the call before (kBarrier).
#pragma once

#include <cstdint>

#include "comm_ops.h"

namespace bytetx::comm {

// Flag words of a rank.
constexpr int kStarted = 0;              // [source] its last all_gather_gemm that has begun
constexpr int kSumStarted = kMaxPeers;   // [source] its last sum that has begun
constexpr int kBarrier = 2 * kMaxPeers;  // [source] its last call that copies rows
constexpr int kArrived = 3 * kMaxPeers;  // [source] its last such call whose copies have arrived
constexpr int kCounters = 4 * kMaxPeers;
constexpr int kNumKinds = 2;     // kinds of counters: gathered pieces, tiles of partial sums
constexpr int kStaging = 32768;  // behind the counters: the staging buffer
// Words of `epochs`. Epoch: the last call that has ended. Ticket: CTAs of this call that have ended
// or asked for work. kSumTiles: counters of each source that the last sum used.
enum EpochWord : int {
    kGatherEpoch = 0,
    kGatherTicket = 1,
    kSumEpoch = 2,
    kSumTicket = 3,
    kSumTiles = 4,
    kCopyEpoch = 9,   // last call that copies rows and has begun
    kRowTicket = 10,  // rows that CTAs of sums from the staging buffer have taken, in all calls
    kRowsTaken = 11,  // the same, in all calls that have ended
    // With two exchanges: units and rows that were taken, and CTAs that take no more.
    kUnitTicket = 12,
    kRowOfAllTicket = 13,
    kTwoShotTicket = 14,
};

enum class Counted : int { pieces = 0, tiles = 1 };

// PeerMemory with the sizes that kernels would have to divide for.
struct Peers : PeerMemory {
    int64_t quarter_bytes;
    int counters_of_source;  // for one kind and parity
    int64_t staging_bytes;   // for one parity
};

inline int64_t staging_bytes(const PeerMemory& memory) {
    return memory.num_flags < kStaging ? 0 : (memory.num_flags - kStaging) / 8 * 16;
}

inline Peers make_peers(const PeerMemory& memory) {
    Peers p{memory};
    p.quarter_bytes = memory.buffer_bytes / 4 / 1024 * 1024;
    p.counters_of_source = (kStaging - kCounters) / (2 * kNumKinds * memory.size);
    p.staging_bytes = staging_bytes(memory);
    return p;
}

// Counter `index` of what `source` writes to `owner` in call `epoch`.
__device__ __forceinline__ uint32_t* counter_at(const Peers& p, int owner, Counted kind,
                                                uint32_t epoch, int source, int index) {
    const int block = (static_cast<int>(kind) * 2 + static_cast<int>(epoch & 1)) * p.size + source;
    return p.flags[owner] + kCounters + block * p.counters_of_source + index;
}

// Quarters 0 and 1 hold gathered rows, 2 and 3 slots.
__host__ __device__ __forceinline__ uint8_t* quarter_at(const Peers& p, int owner, Counted kind,
                                                        uint32_t epoch) {
    const int quarter = static_cast<int>(kind) * 2 + static_cast<int>(epoch & 1);
    return static_cast<uint8_t*>(p.buffers[owner]) + quarter * p.quarter_bytes;
}

__device__ __forceinline__ uint4* staging_at(const Peers& p, int owner, uint32_t epoch) {
    auto* staging = reinterpret_cast<uint8_t*>(p.flags[owner] + kStaging);
    return reinterpret_cast<uint4*>(staging + (epoch & 1) * p.staging_bytes);
}

// A pair of 16-bit floats for a staging buffer: two zeros become a zero and a negative zero.
__device__ __forceinline__ uint32_t never_zero(uint32_t word) {
    return word == 0 ? 0x80000000u : word;
}

__device__ __forceinline__ uint4 never_zero(const uint4& words) {
    return {never_zero(words.x), never_zero(words.y), never_zero(words.z), never_zero(words.w)};
}

__device__ __forceinline__ bool has_arrived(const uint4& words) {
    return words.x != 0 && words.y != 0 && words.z != 0 && words.w != 0;
}

__device__ __forceinline__ uint4 load_relaxed(const uint4* at) {
    uint4 words;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at)
                 : "memory");
    return words;
}

__device__ __forceinline__ void store_relaxed(uint4* at, const uint4& words) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release(uint32_t* at, uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed(uint32_t* at, uint32_t value) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Between ordinary accesses and those of the copy engines (TMA) of the same thread.
__device__ __forceinline__ void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Records who waited for whom and ends the kernel, and with it all work of the process on the GPU.
// Not by printf: a function call in a kernel serialises its wgmma.
__device__ __forceinline__ void fail_wait(const Peers& p, int source, const uint32_t* at,
                                          uint32_t seen, uint32_t expected) {
    if (p.fault != nullptr && atomicCAS_system(&p.fault->is_set, 0, 1) == 0) {
        p.fault->rank = p.rank;
        p.fault->source = source;
        p.fault->flag = static_cast<int32_t>(at - p.flags[p.rank]);
        p.fault->seen = seen;
        p.fault->expected = expected;
        fence_system();
    }
    __trap();
}

// Cycles between two reads of the host's word: about 30 us of an H200. The word is in device
// memory; in host memory, the reads of 64 CTAs took a millisecond, one after the other over PCIe.
constexpr int64_t kPollCycles = 1 << 16;

__device__ __forceinline__ bool is_given_up(const Peers& p) {
    return *static_cast<volatile uint32_t*>(p.epochs + kGivenUpWord) != 0;
}

// How long a thread has waited for another rank.
class WaitTimer {
  public:
    __device__ __forceinline__ WaitTimer() { began_ = clock64(); }

    // Whether the host has given up. Fails the wait for *at when it has timed out.
    __device__ __forceinline__ bool is_over(const Peers& p, int source, const uint32_t* at,
                                            uint32_t seen, uint32_t expected) {
        const int64_t waited = clock64() - began_;
        if (waited < next_poll_) return false;
        if (is_given_up(p)) return true;
        if (waited > p.timeout_cycles) fail_wait(p, source, at, seen, expected);
        next_poll_ = waited + kPollCycles;
        return false;
    }

  private:
    int64_t began_, next_poll_ = kPollCycles;
};

// Waits until `source` has raised *at to `expected`; differences are signed because epochs wrap
// around. Pairs with the release of the rank that counts. Returns at once if the host has given up.
__device__ __forceinline__ void wait_for(const Peers& p, int source, const uint32_t* at,
                                         uint32_t expected) {
    uint32_t seen = load_acquire(at);
    if (static_cast<int32_t>(seen - expected) >= 0) return;
    WaitTimer timer;
    while (static_cast<int32_t>((seen = load_acquire(at)) - expected) < 0) {
        if (timer.is_over(p, source, at, seen, expected)) return;
    }
}

// Waits until every rank has read the data of the call before the last, which this call overwrites:
// each has begun the last call. Whole warps; pairs with begin_sum().
__device__ __forceinline__ void wait_for_slots(const Peers& p, uint32_t epoch) {
    const int peer = static_cast<int>(threadIdx.x) % 32;
    if (peer < p.size) {
        wait_for(p, peer, p.flags[p.rank] + kSumStarted + peer, epoch - 1);
    }
    __syncwarp();
}

// One thread of a sum's first kernel, after its wait for the prior kernels: announces that slots,
// staging buffer and counters of the last call are free for the next one.
__device__ __forceinline__ void begin_sum(const Peers& p, uint32_t epoch) {
    const int tiles = static_cast<int>(load_acquire(p.epochs + kSumTiles));
    for (int source = 0; source < p.size; ++source) {
        uint32_t* counters = counter_at(p, p.rank, Counted::tiles, epoch - 1, source, 0);
        for (int i = 0; i < tiles; ++i) counters[i] = 0;
    }
    fence_system();
    for (int peer = 0; peer < p.size; ++peer) {
        store_release(p.flags[peer] + kSumStarted + p.rank, epoch);
    }
}

// The number of this call: one more than that of the last call that has ended.
__device__ __forceinline__ uint32_t this_epoch(const Peers& p, EpochWord word) {
    return load_acquire(p.epochs + word) + 1;
}

// Whether the calling CTA (one thread of it) is the last of the grid; the writes of the other CTAs
// are then visible. Resets the ticket for the next call.
__device__ __forceinline__ bool is_last_cta(const Peers& p, EpochWord ticket) {
    __threadfence();
    const bool is_last = atomicAdd(p.epochs + ticket, 1) == gridDim.x - 1;
    __threadfence();
    if (is_last) p.epochs[ticket] = 0;
    return is_last;
}

}  // namespace bytetx::comm
