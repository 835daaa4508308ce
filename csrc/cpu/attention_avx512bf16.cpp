// Varlen attention in bf16 on AVX-512 BF16: both products by vdpbf16ps, weights rounded to bf16.
// It counts denormal bf16 operands as zero, and f32 is attention_avx512.cpp's.  Compiled with the
// flags for these; without them (another processor, a compiler that lacks them) it is absent.
#include "cpu/attention.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__)

#include "cpu/attention_simd_avx512.h"
//
#include "cpu/attention_kernel.h"

bytetx::cpu::AttentionKernel bytetx::cpu::attention_avx512bf16(DType dtype) {
    return dtype == DType::bf16 ? attend<Avx512Bf16, uint16_t> : nullptr;
}

#else

bytetx::cpu::AttentionKernel bytetx::cpu::attention_avx512bf16(DType) { return nullptr; }

#endif
