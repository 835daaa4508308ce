// Launches whose start overlaps the end of the kernel before them (programmatic dependent launch).
//
// Every kernel of the core is launched by launch_kernel() and keeps two rules:
//   - Each CTA calls wait_for_prior_kernel() before it reads or writes anything that a kernel
//   before
//     it may touch; weights and plan-independent set-up (barriers, tensor maps) may come earlier.
//     No CTA returns without it: the wait of the kernel after covers only the kernel right before.
//     Where the kernel before released this one only after its own wait, and this one touches
//     nothing of it, the wait of one CTA at its end is enough (decode rows beside tiles).
//   - release_next_kernel() lets the next kernel's CTAs take free places of an SM. It takes effect
//     when every CTA has called it or ended, so calling it first thing starves nobody.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "common/check.cuh"

namespace bytetx {

struct LaunchShape {
    dim3 grid;
    dim3 block;
    int smem_bytes = 0;
    cudaStream_t stream = nullptr;
    int cluster_ctas = 1;  // along x
};

// Until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_prior_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void release_next_kernel() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Raises the kernel's limit of dynamic shared memory, which is 48 KB, on the current device.
template <typename Kernel>
void allow_smem(Kernel kernel, int bytes) {
    BYTETX_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// The same, asked of the driver once a device, for a call costs a microsecond.
template <auto kKernel>
void allow_smem_once(int bytes) {
    static std::atomic<uint64_t> is_allowed{0};  // a bit a device
    int device;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((is_allowed.load(std::memory_order_acquire) & bit) != 0) return;
    allow_smem(kKernel, bytes);
    is_allowed.fetch_or(bit, std::memory_order_release);
}

// Number of SMs of the current device.
inline int num_sms() {
    int device, count;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    BYTETX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

// More than 48 KB need allow_smem() before.
template <typename... Params, typename... Args>
void launch_kernel(void (*kernel)(Params...), const LaunchShape& shape, Args&&... args) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(shape.cluster_ctas);
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
    config.stream = shape.stream;
    config.attrs = attributes;
    config.numAttrs = shape.cluster_ctas > 1 ? 2 : 1;
    BYTETX_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace bytetx
