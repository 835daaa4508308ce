// Varlen attention on AVX-512 F, BW, DQ and VL; bf16 is widened to f32.
#include "cpu/attention_simd_avx512.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernels bytetx::cpu::attention_avx512(DType dtype) {
    if (dtype == DType::f32) return attention_kernels<Avx512, float>();
    if (dtype == DType::bf16) return attention_kernels<Avx512, uint16_t>();
    return {};
}
