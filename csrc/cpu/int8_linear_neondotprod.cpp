#include "cpu/int8_kernel.h"

namespace bytetx::cpu::neon_dotprod {

const Int8Kernel kInt8Kernel = make_int8_kernel();

}  // namespace bytetx::cpu::neon_dotprod
