#include "cpu/rows_kernels.h"

namespace bytetx::cpu::neon_bf16 {

const RowKernels kRowKernels = make_row_kernels();

}  // namespace bytetx::cpu::neon_bf16
