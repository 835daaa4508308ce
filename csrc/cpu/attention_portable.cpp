// Varlen attention on any processor that gcc or clang compiles for; bf16 is widened to f32.
#include "cpu/attention_simd_portable.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernels bytetx::cpu::attention_portable(DType dtype) {
    if (dtype == DType::f32) return attention_kernels<Portable, float>();
    if (dtype == DType::bf16) return attention_kernels<Portable, uint16_t>();
    return {};
}
