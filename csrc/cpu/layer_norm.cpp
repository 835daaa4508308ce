#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bytetx {

void layer_norm(const LayerNormParams& p, const Launch& launch) {
    if (p.total_tokens == 0) return;
    cpu::check_rows("layer_norm", p.dtype, p.hidden_size);
    const cpu::RowKernels& kernels = cpu::row_kernels(launch.isa);
    cpu::parallel_for(p.total_tokens, cpu::rows_per_piece(p.hidden_size), launch.num_threads,
                      [&](int64_t begin, int64_t end) { kernels.layer_norm(p, begin, end); });
}

}  // namespace bytetx
