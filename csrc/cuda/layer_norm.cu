// Layer norm over packed rows, with the residual addition before it, and where asked the sum itself
// and an E4M3 copy of the result.
//
//   h = x + residual;  out = (h - mean(h)) * rsqrt(mean((h - mean(h))^2) + eps) * weight + bias
//
// The kernels are norm_rows.cuh's: who does what, and why, stands there.
//
// Bytes: (2 or 3, with the sum 4) * total_tokens * hidden_size * sizeof(T). Bound by HBM: 0.95 to
// 0.99 of the copy rate with residual at 32k to 65k rows of 384 to 1024 f16 on an H200
// (2026-11-21); 16 to 256 rows take 1.3 to 1.6 us in a chain of launches. Source: standard; the
// fusion is ByteTransformer's (arXiv 2210.03052).

#include "cuda/norm_rows.cuh"

namespace bytetx {

void layer_norm(const NormParams& p, const Launch& launch) {
    launch_norm<RowNorm::layer>("layer_norm", p, launch);
}

}  // namespace bytetx
