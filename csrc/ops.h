// The contract of the native core: one params struct and one declaration per op. csrc/cpu/ and
// csrc/cuda/ both implement it, in two separate modules (_cpu and _cuda) that hide their symbols,
// so one name serves both. No CUDA, Python or torch header is included here.
//
// For every op: pointers are the caller's and stay valid until the call returns (cpu) or the stream
// has run it (cuda); nothing is allocated and nothing synchronises; a size of zero is no work.
// Caller's faults throw std::invalid_argument, failures of the device std::runtime_error.
#pragma once

#include <cstdint>

namespace bytetx {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

// Where an op runs. cuda/ reads device and stream, cpu/ reads num_threads.
struct Launch {
    int device;
    void* stream;  // a cudaStream_t
    int num_threads;
};

// out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias,  h = x + residual, statistics in f32.
struct LayerNormParams {
    const void* x;         // [total_tokens, hidden_size], dtype, contiguous
    const void* residual;  // as x, or null for none
    void* out;             // as x; may be x or residual itself
    const void* weight;    // [hidden_size], dtype
    const void* bias;      // [hidden_size], dtype, or null for none
    int64_t total_tokens;
    int64_t hidden_size;
    float eps;
    DType dtype;
};

void layer_norm(const LayerNormParams& p, const Launch& launch);

}  // namespace bytetx
