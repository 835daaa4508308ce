// Linear layers of bf16: the part of ops.h that only cpu implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// cpu only, on processors with AVX2 or NEON. d = act(x @ w.T + bias), products and sums in f32: one
// chain of sums over k for each result, in the order of k, whatever m, the row's place and the
// number of threads are.
struct Bf16LinearParams {
    const void* x;       // [m, k], bf16, contiguous
    const void* weight;  // [n, k], bf16, contiguous; or packed: [n / 32, k / 2, 32, 2], 2 features
                         // of 32 outputs behind one another, n and k filled up with zeros
    const void* bias;    // [n], bf16, or null for none
    void* d;             // [m, n], bf16
    void* workspace;     // bf16_linear_workspace_bytes long, 64-byte aligned
    int64_t workspace_bytes;
    int64_t m;
    int64_t n;
    int64_t k;
    Activation activation;
    bool is_packed;
};

int64_t bf16_linear_workspace_bytes(int64_t k, int num_threads);
void bf16_linear(const Bf16LinearParams& p, const Launch& launch);

// The instruction set that it runs with by itself, for people, or null where it cannot run.
const char* bf16_linear_isa();

}  // namespace bytetx
