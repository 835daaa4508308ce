#include "cpu/rows_kernels.h"

namespace bytetx::cpu::neon {

const RowKernels kRowKernels = make_row_kernels();

}  // namespace bytetx::cpu::neon
