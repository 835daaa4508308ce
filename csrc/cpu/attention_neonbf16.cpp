// Varlen attention in bf16 on ARM with bf16: both products by bfdot, weights rounded to bf16.
// Denormal bf16 operands count as zero there.  f32 is attention_neon.cpp's.
#include "cpu/attention_simd_neon.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernels bytetx::cpu::attention_neonbf16(DType dtype) {
    if (dtype == DType::bf16) return attention_kernels<NeonBf16, uint16_t>();
    return {};
}
