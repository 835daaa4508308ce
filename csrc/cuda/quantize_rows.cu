// E4M3 rows with one f32 scale each, as the operand of an FP8 GEMM.
//
//   scale[i] = amax / 448;  out_fp8[i] = e4m3(x[i] * (448 / amax)),  amax = max(|x[i]|, 2^-100)
//
// x [total_tokens, hidden_size] f32, f16, bf16. The kernel is norm_rows.cuh's without a norm: a
// warp or a CTA holds a row in registers, so x is read once. Zeros keep their sign. Rounded to
// nearest even; 448 is the largest of E4M3, and the floor of amax keeps its inverse finite.
//
// Bytes: total_tokens * hidden_size * (sizeof(T) + 1). Bound by HBM; fraction reached:
// docs/kernels/norm-embedding-pooling.md. Source: standard.

#include "cuda/norm_rows.cuh"

namespace bytetx {

void quantize_rows(const QuantizeRowsParams& p, const Launch& launch) {
    NormParams rows{};
    rows.x = p.x;
    rows.out_fp8 = p.out_fp8;
    rows.out_scale = p.out_scale;
    rows.total_tokens = p.total_tokens;
    rows.hidden_size = p.hidden_size;
    rows.dtype = p.dtype;
    launch_norm<RowNorm::none>("quantize_rows", rows, launch);
}

}  // namespace bytetx
