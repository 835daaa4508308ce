#include "cpu/round_kernel.h"

namespace bytetx::cpu::neon {

const GroupKernelTable kGroupKernels = make_group_kernels();

}  // namespace bytetx::cpu::neon
