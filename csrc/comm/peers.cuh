// Memory that the GPUs of a group write to each other: where it is, and how a kernel waits for it.
//
// Every rank owns a buffer and flag words that all others can write. A buffer has four quarters:
// rows that were gathered, for odd and for even calls, and slots of partial sums, likewise. A call
// has a number, its epoch, which lies in device memory and is counted up by the call's last CTA, so
// that a captured graph can be replayed; all ranks make the same calls in the same order, so their
// epochs agree. What arrives is counted: whoever has written a piece of data adds one to its
// counter on the rank that reads it. The reader sets its counters back to zero when it has read the
// data, at the end of an all_gather_gemm or at the start of the sum after this one, and says that
// it has begun the next call (kStarted, kSumStarted); nobody writes to a quarter, or counts for it,
// before. Partial sums of up to some hundred rows, and sums that their owner sends to all, go to an
// staging buffer behind the flags instead, for odd and for even calls, and are not counted: a word
// of theirs is never zero, and zero until it has come. So nobody waits until all of it is there,
// and no fence stands between a word and the news of it. The reader sets it back. What copy engines
// bring has a region of its own, of which this file knows nothing but the words that say that it
// has come (kArrived; kEarly of the first of two copies), and that all ranks have read what came
// before (kBarrier).
#pragma once

#include <cstdint>

#include "comm_ops.h"

namespace bytetx::comm {

// Flag words of a rank.
constexpr int kStarted = 0;              // [source] its last all_gather_gemm that has begun
constexpr int kSumStarted = kMaxPeers;   // [source] its last sum that has begun
constexpr int kBarrier = 2 * kMaxPeers;  // [source] its last call that copies rows
constexpr int kArrived = 3 * kMaxPeers;  // [source] the last of these calls whose copies have come
constexpr int kEarly = 4 * kMaxPeers;    // [source] the last whose early copies have come
constexpr int kCounters = 5 * kMaxPeers;
constexpr int kNumKinds = 2;     // of counters: gathered pieces, tiles of partial sums
constexpr int kStaging = 32768;  // behind the counters: the staging buffer
// Words of `epochs`: the last call that has ended, the CTAs of this one that have, and counters of
// each source that it used.
enum EpochWord : int {
    kGatherEpoch = 0,
    kGatherTicket = 1,
    kSumEpoch = 2,
    kSumTicket = 3,
    kSumTiles = 4,
    kCopyEpoch = 9,   // of calls that copy rows: the last that has begun
    kRowTicket = 10,  // rows that CTAs of sums from the staging buffer have asked for, in all calls
    kRowsTaken = 11,  // the same, in all calls that have ended
    // Of a call in two exchanges: units and rows that were asked for, and CTAs that ask no more.
    kUnitTicket = 12,
    kRowOfAllTicket = 13,
    kTwoShotTicket = 14,
};

enum class Counted : int { pieces = 0, tiles = 1 };

// PeerMemory as kernels use it: nothing is left to be divided.
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

// A pair of 16-bit floats as a staging buffer takes it: of two zeros one is negative.
__device__ __forceinline__ uint32_t never_zero(uint32_t word) {
    return word == 0 ? 0x80000000u : word;
}

__device__ __forceinline__ uint4 never_zero(const uint4& words) {
    return {never_zero(words.x), never_zero(words.y), never_zero(words.z), never_zero(words.w)};
}

__device__ __forceinline__ bool has_come(const uint4& words) {
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

// Says who waited for whom and ends the kernel, and with it everything that the process has on the
// GPU. Not by printf: a function call in a kernel serialises its wgmma.
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

// Cycles between two looks at the host's word: about 30 us of an H200. It lies in the device's own
// memory; in the host's, looks of 64 CTAs took a millisecond, one after the other over PCIe.
constexpr int64_t kLookCycles = 1 << 16;

__device__ __forceinline__ bool is_given_up(const Peers& p) {
    return *static_cast<volatile uint32_t*>(p.epochs + kGivenUpWord) != 0;
}

// How long a thread has waited for another rank.
class Patience {
  public:
    __device__ __forceinline__ Patience() { began_ = clock64(); }

    // Whether the host has given up; fails the wait for *at when it has taken too long.
    __device__ __forceinline__ bool has_ended(const Peers& p, int source, const uint32_t* at,
                                              uint32_t seen, uint32_t expected) {
        const int64_t waited = clock64() - began_;
        if (waited < next_look_) return false;
        if (is_given_up(p)) return true;
        if (waited > p.timeout_cycles) fail_wait(p, source, at, seen, expected);
        next_look_ = waited + kLookCycles;
        return false;
    }

  private:
    int64_t began_, next_look_ = kLookCycles;
};

// Until `source` has brought *at to `expected`; differences are signed, for epochs wrap around.
// Pairs with the release of whoever counts there. Returns at once where the host has given up.
__device__ __forceinline__ void wait_for(const Peers& p, int source, const uint32_t* at,
                                         uint32_t expected) {
    uint32_t seen = load_acquire(at);
    if (static_cast<int32_t>(seen - expected) >= 0) return;
    Patience patience;
    while (static_cast<int32_t>((seen = load_acquire(at)) - expected) < 0) {
        if (patience.has_ended(p, source, at, seen, expected)) return;
    }
}

// Until every rank has read what came in the call before the last, which this one's replaces: it
// has begun the last. Whole warps; pairs with begin_sum().
__device__ __forceinline__ void wait_for_slots(const Peers& p, uint32_t epoch) {
    const int peer = static_cast<int>(threadIdx.x) % 32;
    if (peer < p.size) {
        wait_for(p, peer, p.flags[p.rank] + kSumStarted + peer, epoch - 1);
    }
    __syncwarp();
}

// By one thread of a sum's first kernel, behind its wait for the kernels before: slots, staging
// buffer and counters of the last call are free for the next one.
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

// Number of this call: one more than the last that has ended.
__device__ __forceinline__ uint32_t this_epoch(const Peers& p, EpochWord word) {
    return load_acquire(p.epochs + word) + 1;
}

// Whether the calling CTA (one thread of it) is the grid's last; what the others did before their
// call is then visible. The ticket is left at zero for the next call.
__device__ __forceinline__ bool is_last_cta(const Peers& p, EpochWord ticket) {
    __threadfence();
    const bool is_last = atomicAdd(p.epochs + ticket, 1) == gridDim.x - 1;
    __threadfence();
    if (is_last) p.epochs[ticket] = 0;
    return is_last;
}

}  // namespace bytetx::comm
