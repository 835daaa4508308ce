// Varlen attention on 64-bit ARM; bf16 is widened to f32.
#include "cpu/attention_simd_neon.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernels bytetx::cpu::attention_neon(DType dtype) {
    if (dtype == DType::f32) return attention_kernels<Neon, float>();
    if (dtype == DType::bf16) return attention_kernels<Neon, uint16_t>();
    return {};
}
