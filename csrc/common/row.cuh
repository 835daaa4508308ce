// What kernels that work row by row share: 16-byte accesses, conversion through f32, row sums.
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

template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const void* base, int64_t index) {
    return static_cast<const Vec<T>*>(base)[index];
}

// Reads through the read-only cache: for parameters that every row reads again.
template <typename T>
__device__ __forceinline__ Vec<T> load_vec_readonly(const void* base, int64_t index) {
    const uint4 bits = __ldg(static_cast<const uint4*>(base) + index);
    return *reinterpret_cast<const Vec<T>*>(&bits);
}

template <typename T>
__device__ __forceinline__ void store_vec(void* base, int64_t index, const Vec<T>& vec) {
    static_cast<Vec<T>*>(base)[index] = vec;
}

// Whether rows of hidden_size elements at these addresses can be read 16 bytes at a time.
template <typename T, typename... Pointers>
bool fits_vecs(int64_t hidden_size, const Pointers*... addresses) {
    const auto is_aligned = [](const void* address) {
        return reinterpret_cast<std::uintptr_t>(address) % kVecBytes == 0;  // null is aligned, too
    };
    return hidden_size % kVecSize<T> == 0 && (is_aligned(addresses) && ...);
}

// Sum over the kThreads threads that share a row; every one of them gets it. The order of additions
// depends on kThreads alone. More than one warp: all threads of the CTA call it, on the same row.
template <int kThreads>
__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    if constexpr (kThreads > kWarpSize) {
        constexpr int kNumWarps = kThreads / kWarpSize;
        __shared__ float partial[kNumWarps];
        __syncthreads();  // pairs with the reads at the end of the row_sum before this one
        if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
        __syncthreads();  // every warp's partial sum is written
        value = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kNumWarps; ++warp) value += partial[warp];
    }
    return value;
}

}  // namespace bytetx
