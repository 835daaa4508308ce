#include "cpu/round_kernel.h"

namespace bytetx::cpu::avx2 {

const GroupKernelTable kGroupKernels = make_group_kernels();

}  // namespace bytetx::cpu::avx2
