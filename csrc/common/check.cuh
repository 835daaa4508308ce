// Errors of the CUDA runtime as exceptions, and the guard that makes a launcher's device current.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace bytetx {

inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                             cudaGetErrorString(status));
}

#define BYTETX_CUDA_CHECK(call) ::bytetx::cuda_check((call), #call, __FILE__, __LINE__)

// Makes `device` current and gives the caller's device back. Here, not in Python, so that the hot
// path carries no context manager.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) : device_(device) {
        BYTETX_CUDA_CHECK(cudaGetDevice(&previous_));
        if (previous_ != device_) BYTETX_CUDA_CHECK(cudaSetDevice(device_));
    }
    ~DeviceGuard() {
        if (previous_ != device_) cudaSetDevice(previous_);  // a destructor cannot report a failure
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int device_;
    int previous_ = 0;
};

}  // namespace bytetx
