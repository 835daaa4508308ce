#include "cpu/int8_tile_kernel.h"

namespace bytetx::cpu::amx_int8 {

const Int8Kernel kInt8Kernel = make_int8_kernel();

}  // namespace bytetx::cpu::amx_int8
