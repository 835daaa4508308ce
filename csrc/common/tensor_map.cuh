// The driver's function that encodes tensor maps, found at run time: nothing links libcuda.
#pragma once

#include <cudaTypedefs.h>

#include <stdexcept>

#include "common/check.cuh"

namespace bytetx {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
    static const auto encoder = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result{};
        BYTETX_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                           12000, cudaEnableDefault, &result));
        if (result != cudaDriverEntryPointSuccess) {
            throw std::runtime_error(
                "the CUDA driver has no cuTensorMapEncodeTiled: it is too old");
        }
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }();
    return encoder;
}

}  // namespace bytetx
