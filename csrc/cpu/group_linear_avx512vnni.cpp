#include "cpu/round_kernel.h"

namespace bytetx::cpu::avx512_vnni {

const GroupKernelTable kGroupKernels = make_group_kernels();

}  // namespace bytetx::cpu::avx512_vnni
