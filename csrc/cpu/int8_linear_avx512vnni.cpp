#include "cpu/int8_kernel.h"

namespace bytetx::cpu::avx512_vnni {

const Int8Kernel kInt8Kernel = make_int8_kernel();

}  // namespace bytetx::cpu::avx512_vnni
