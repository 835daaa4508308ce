// RMS norm over packed rows, with the residual addition before it, and where asked the sum itself
// and an E4M3 copy of the result.
//
//   h = x + residual;  out = h * rsqrt(mean(h^2) + eps) * weight
//
// The kernels are those of norm_rows.cuh, without the mean; the work split is described there.
//
// Bytes: (2 to 4) * total_tokens * hidden_size * sizeof(T). Bound by HBM; fraction reached:
// docs/kernels/norm-embedding-pooling.md. Source: root mean square layer normalization (arXiv
// 1910.07467).

#include "cuda/norm_rows.cuh"

namespace bytetx {

void rms_norm(const NormParams& p, const Launch& launch) {
    launch_norm<RowNorm::rms>("rms_norm", p, launch);
}

}  // namespace bytetx
