// Varlen attention on AVX2 and FMA; bf16 is widened to f32.
#include "cpu/attention_simd_avx2.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernels bytetx::cpu::attention_avx2(DType dtype) {
    if (dtype == DType::f32) return attention_kernels<Avx2, float>();
    if (dtype == DType::bf16) return attention_kernels<Avx2, uint16_t>();
    return {};
}
