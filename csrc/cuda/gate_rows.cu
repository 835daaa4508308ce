// The second half of a gated linear layer whose product is another GEMM's:
//
//   out[i, 32 b + c] = act(both[i, 64 b + c]) * both[i, 64 b + 32 + c]
//
// both [m, 2 n] and out [m, n], f16 or bf16; n a multiple of 32. A thread makes eight neighbours of
// out from 16 bytes of gates and 16 of values. Bytes: 3 m n * 2; bound by HBM, for few rows by a
// launch. Source: GLU variants (arXiv 2002.05202), section 2.
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "gate_ops.h"

namespace bytetx {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 32;  // gates, and values, that lie behind one another
constexpr int kVec = 8;     // numbers of 16 bytes

template <Activation kActivation>
__device__ __forceinline__ float gate(float x) {
    if constexpr (kActivation == Activation::silu) return x / (1.0f + __expf(-x));
    if constexpr (kActivation == Activation::gelu) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    }
    // gelu_tanh: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
    const float z = 1.5957691216057308f * fmaf(0.044715f * x * x, x, x);
    return x / (1.0f + __expf(-z));
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gate_rows_kernel(const GateRowsParams p) {
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t vecs_of_row = p.n / kVec;
    const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (v >= p.m * vecs_of_row) return;
    const int64_t row = v / vecs_of_row, column = v % vecs_of_row * kVec;
    const int64_t place = row * 2 * p.n + column / kBlock * 2 * kBlock + column % kBlock;
    const T* both = static_cast<const T*>(p.both) + place;
    const uint4 gates = *reinterpret_cast<const uint4*>(both);
    const uint4 values = *reinterpret_cast<const uint4*>(both + kBlock);
    float out[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
        out[j] = gate<kActivation>(element<T>(gates, j)) * element<T>(values, j);
    }
    static_cast<uint4*>(p.out)[v] = pack<T>(out);
}

template <typename T>
void launch_gate(const GateRowsParams& p, cudaStream_t stream) {
    const int64_t ctas = (p.m * p.n / kVec + kThreads - 1) / kThreads;
    const LaunchShape shape{dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0, stream};
    switch (p.activation) {
        case Activation::silu:
            return launch_kernel(gate_rows_kernel<T, Activation::silu>, shape, p);
        case Activation::gelu:
            return launch_kernel(gate_rows_kernel<T, Activation::gelu>, shape, p);
        case Activation::gelu_tanh:
            return launch_kernel(gate_rows_kernel<T, Activation::gelu_tanh>, shape, p);
        default:
            throw std::invalid_argument("gate_rows gates by gelu, gelu_tanh or silu");
    }
}

}  // namespace

void gate_rows(const GateRowsParams& p, const Launch& launch) {
    if (p.n <= 0 || p.n % kBlock != 0 || p.m < 0 || p.dtype == DType::f32) {
        throw std::invalid_argument("gate_rows takes f16 or bf16 and n % 32 == 0, got n = " +
                                    std::to_string(p.n));
    }
    if (p.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (p.dtype == DType::f16) {
        launch_gate<__half>(p, stream);
    } else {
        launch_gate<__nv_bfloat16>(p, stream);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
