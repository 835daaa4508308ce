// The numbers that GEMMs and attention multiply.
#pragma once

#include <cutlass/numeric_types.h>

namespace bytetx {

using Half = cutlass::half_t;
using BFloat16 = cutlass::bfloat16_t;
using E4m3 = cutlass::float_e4m3_t;

}  // namespace bytetx
