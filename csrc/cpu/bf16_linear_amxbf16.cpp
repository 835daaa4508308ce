#include "cpu/bf16_tile_kernel.h"

namespace bytetx::cpu::amx_bf16 {

const Bf16Kernel kBf16Kernel = make_bf16_kernel();

}  // namespace bytetx::cpu::amx_bf16
