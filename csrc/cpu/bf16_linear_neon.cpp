#include "cpu/bf16_kernel.h"

namespace bytetx::cpu::neon {

const Bf16Kernel kBf16Kernel = make_bf16_kernel();

}  // namespace bytetx::cpu::neon
