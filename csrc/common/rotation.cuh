// The rotation of one pair of features by a rotary angle.
#pragma once

namespace bytetx {

// Rounded where it says so, or kernels that are compiled with other code around it round elsewhere.
__device__ __forceinline__ void rotate(float& a, float& b, float cos, float sin) {
    const float x = a;
    a = fmaf(x, cos, -__fmul_rn(b, sin));
    b = fmaf(b, cos, __fmul_rn(x, sin));
}

}  // namespace bytetx
