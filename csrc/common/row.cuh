// Shared by kernels that work row by row: 16-byte accesses, conversion through f32, row sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bytetx {

constexpr int kWarpSize = 32;
constexpr int kVecBytes = 16;  // the widest access of one thread

template <typename T>
constexpr int kVecSize = kVecBytes / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(kVecBytes) Vec {
    T value[kVecSize<T>];
};

// Vectors wait in registers as untyped words: 16-bit elements that may be loaded or not cost a
// register each.
template <typename T>
__device__ __forceinline__ float element(const uint4& words, int j) {
    return static_cast<float>(reinterpret_cast<const Vec<T>*>(&words)->value[j]);
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&values)[kVecSize<T>]) {
    Vec<T> vec;
#pragma unroll
    for (int j = 0; j < kVecSize<T>; ++j) vec.value[j] = static_cast<T>(values[j]);
    return *reinterpret_cast<const uint4*>(&vec);
}

// Reads what is read once: it passes L1 by, where parameters and tables stay. Not through the
// read-only path, for a kernel before this one may have written it while this one had started.
__device__ __forceinline__ uint4 load_once(const uint4* at) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at));
    return words;
}

// A cache policy: what is read under it leaves the L2 first. Made once a thread, for an access that
// makes its own is no plain load any more: branches stay around it.
__device__ __forceinline__ uint64_t first_out_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// load_once() of what is not read again at all. policy: first_out_policy().
__device__ __forceinline__ uint4 load_last(const uint4* at, uint64_t policy) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at), "l"(policy));
    return words;
}

// Writes what is more than the L2 holds: it leaves it first.
__device__ __forceinline__ void store_streaming(uint4* at, const uint4& words) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}

// 16 bytes to shared memory, on their way until a wait_for_copies() of the same thread. A thread
// that reads only what it copied needs no barrier.
__device__ __forceinline__ void copy_async(uint4* to, const void* from) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the last kLeft groups of this thread have arrived.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Whether rows of hidden_size elements at these addresses can be read 16 bytes at a time.
template <typename T, typename... Pointers>
bool fits_vecs(int64_t hidden_size, const Pointers*... addresses) {
    const auto is_aligned = [](const void* address) {
        return reinterpret_cast<std::uintptr_t>(address) % kVecBytes == 0;  // null is aligned, too
    };
    return hidden_size % kVecSize<T> == 0 && (is_aligned(addresses) && ...);
}

// A barrier of the CTA's first kThreads threads, beside which it may have others.
template <int kThreads>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// One value of the kThreads threads that share a row, joined; every one of them gets it. The order
// depends on kThreads alone. The whole warp calls it, also where it holds several rows; more than
// one warp: the CTA's first kThreads threads, on the same row.
template <int kThreads, typename Join>
__device__ __forceinline__ float row_reduce(float value, const Join& join) {
#pragma unroll
    for (int offset = (kThreads < kWarpSize ? kThreads : kWarpSize) / 2; offset > 0; offset /= 2) {
        value = join(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    if constexpr (kThreads > kWarpSize) {
        constexpr int kNumWarps = kThreads / kWarpSize;
        __shared__ float partial[kNumWarps];
        sync_threads<kThreads>();  // pairs with the reads at the end of the row_reduce before this
                                   // one
        if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
        sync_threads<kThreads>();  // every warp's partial value is written
        value = partial[0];
#pragma unroll
        for (int warp = 1; warp < kNumWarps; ++warp) value = join(value, partial[warp]);
    }
    return value;
}

template <int kThreads>
__device__ __forceinline__ float row_sum(float value) {
    return row_reduce<kThreads>(value, [](float a, float b) { return a + b; });
}

template <int kThreads>
__device__ __forceinline__ float row_max(float value) {
    return row_reduce<kThreads>(value, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace bytetx
