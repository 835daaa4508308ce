// Instructions of Hopper that CUDA C++ has no function for: barriers in shared memory (mbarrier),
// copies by the copy engine (TMA), barriers of a cluster and of some warps, registers that move
// between warpgroups. common/wgmma.cuh has those of the matrix unit.
#pragma once

#include <cuda.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

namespace bytetx {

__device__ __forceinline__ uint32_t smem_address(const void* smem) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// An mbarrier, 64 bits of shared memory. A phase ends when as many threads have arrived as init()
// says and all bytes that they expect have come; wait() returns when the phase of that parity has
// ended.
struct Barrier {
    static __device__ __forceinline__ void init(uint64_t* barrier, uint32_t arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
                     "r"(arrivals));
    }

    static __device__ __forceinline__ void wait(const uint64_t* barrier, uint32_t parity) {
        constexpr uint32_t kSuspendNs = 10'000'000;  // at most, before it is asked again
        asm volatile(
            "{\n"
            ".reg .pred is_over;\n"
            "AGAIN:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%0], %1, %2;\n"
            "@is_over bra OVER;\n"
            "bra AGAIN;\n"
            "OVER:\n"
            "}" ::"r"(smem_address(barrier)),
            "r"(parity), "r"(kSuspendNs));
    }

    static __device__ __forceinline__ void arrive(uint64_t* barrier) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)));
    }

    // At the barrier that lies at the same address in another CTA of the cluster.
    static __device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
        asm volatile(
            "{\n"
            ".reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
            "}" ::"r"(smem_address(barrier)),
            "r"(rank));
    }

    // Arrives, and has the phase wait for so many bytes of copies.
    static __device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
            "r"(bytes));
    }
};

// The two roles of the barriers of a ring: its buffers are full, are empty.
using FullBarrier = Barrier;
using EmptyBarrier = Barrier;

// Behind init(), before a barrier of the CTA or cluster: copies and other CTAs see the barriers.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::);
}

// From here on wgmma and copies read what threads wrote to shared memory.
__device__ __forceinline__ void fence_async_reads() {
    asm volatile("fence.proxy.async.shared::cta;" ::);
}

// ---- warps of a CTA

// Named barriers; 0 to 7 are left to __syncthreads() and libraries.
constexpr int kFirstNamedBarrier = 8;

__device__ __forceinline__ void sync_threads_of(int num_threads, int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number + kFirstNamedBarrier), "r"(num_threads));
}

__device__ __forceinline__ void arrive_threads_of(int num_threads, int number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number + kFirstNamedBarrier), "r"(num_threads));
}

// From now on each thread of the warpgroup has so many registers: fewer, or more.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}

// ---- CTAs of a cluster

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ int cluster_size() {  // along x
    int size;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}

__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;" ::);
}

// Without making writes visible.
__device__ __forceinline__ void arrive_in_cluster_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::);
}

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.aligned;" ::);
}

// ---- copies

// How long what is read stays in L2: the cache policies that `createpolicy` gives for all bytes.
enum class L2Policy : uint64_t {
    evict_normal = 0x1000000000000000,
    evict_first = 0x12F0000000000000,
    evict_last = 0x14F0000000000000,
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// One thread: the box of a tensor map that begins at x0, x1, ... (the dimension of neighbours
// first) goes to `to`; its bytes arrive at `barrier`.
__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, L2Policy policy,
                                         void* to, const int& x0, const int& x1) {
    const uint32_t bar = smem_address(barrier), target = smem_address(to);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(x0), "r"(x1),
        "l"(static_cast<uint64_t>(policy))
        : "memory");
}

__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, L2Policy policy,
                                         void* to, const int& x0, const int& x1, const int& x2) {
    const uint32_t bar = smem_address(barrier), target = smem_address(to);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(x0), "r"(x1), "r"(x2),
        "l"(static_cast<uint64_t>(policy))
        : "memory");
}

__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, L2Policy policy,
                                         void* to, const int& x0, const int& x1, const int& x2,
                                         const int& x3) {
    const uint32_t bar = smem_address(barrier), target = smem_address(to);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
        "l"(static_cast<uint64_t>(policy))
        : "memory");
}

__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, L2Policy policy,
                                         void* to, const int& x0, const int& x1, const int& x2,
                                         const int& x3, const int& x4) {
    const uint32_t bar = smem_address(barrier), target = smem_address(to);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4),
        "l"(static_cast<uint64_t>(policy))
        : "memory");
}

// The same to the CTAs of the cluster whose bits are set in `ranks`, to this address in each.
__device__ __forceinline__ void load_box_to(uint16_t ranks, const CUtensorMap* map,
                                            uint64_t* barrier, L2Policy policy, void* to,
                                            const int& x0, const int& x1) {
    const uint32_t bar = smem_address(barrier), target = smem_address(to);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(
            smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "h"(ranks), "r"(x0), "r"(x1),
        "l"(static_cast<uint64_t>(policy))
        : "memory");
}

__device__ __forceinline__ void load_box_to(uint16_t ranks, const CUtensorMap* map,
                                            uint64_t* barrier, L2Policy policy, void* to,
                                            const int& x0, const int& x1, const int& x2,
                                            const int& x3, const int& x4) {
    const uint32_t bar = smem_address(barrier), target = smem_address(to);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3, %9;" ::"r"(
            smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "h"(ranks), "r"(x0), "r"(x1), "r"(x2),
        "r"(x3), "r"(x4), "l"(static_cast<uint64_t>(policy))
        : "memory");
}

// Bytes side by side, a multiple of 16, from and to multiples of 16.
__device__ __forceinline__ void load_bytes(const void* from, uint64_t* barrier, void* to,
                                           int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(smem_address(to)),
        "l"(from), "r"(bytes), "r"(smem_address(barrier))
        : "memory");
}

__device__ __forceinline__ void load_bytes(const void* from, uint64_t* barrier, void* to, int bytes,
                                           L2Policy policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(smem_address(to)),
        "l"(from), "r"(bytes), "r"(smem_address(barrier)), "l"(static_cast<uint64_t>(policy))
        : "memory");
}

// From shared memory; a part of the group that the next commit_stores() ends.
__device__ __forceinline__ void store_bytes(const void* from, void* to, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(smem_address(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;"); }

}  // namespace bytetx
