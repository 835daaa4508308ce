// Varlen attention in bf16 on AVX-512 BF16: both products by vdpbf16ps, weights rounded to bf16.
// Denormal bf16 operands count as zero there.  f32 is attention_avx512.cpp's.
#include "cpu/attention_simd_avx512.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernels bytetx::cpu::attention_avx512bf16(DType dtype) {
    if (dtype == DType::bf16) return attention_kernels<Avx512Bf16, uint16_t>();
    return {};
}
