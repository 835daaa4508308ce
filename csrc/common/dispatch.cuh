// From run-time values to template arguments, once, in the launcher.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops.h"

namespace bytetx {

// Calls f.operator()<T>() with the element type that `dtype` stands for.
template <typename F>
void dispatch_dtype(DType dtype, F&& f) {
    switch (dtype) {
        case DType::f32:
            return f.template operator()<float>();
        case DType::f16:
            return f.template operator()<__half>();
        case DType::bf16:
            return f.template operator()<__nv_bfloat16>();
    }
    throw std::invalid_argument("unknown dtype code " + std::to_string(static_cast<int>(dtype)));
}

// Calls f.operator()<k>() with the first of the ascending constants that is at least `value`;
// returns false where even the last is smaller.
template <int kFirst, int... kRest, typename F>
bool dispatch_at_least(int64_t value, F&& f) {
    if (value <= kFirst) {
        f.template operator()<kFirst>();
        return true;
    }
    if constexpr (sizeof...(kRest) > 0) {
        return dispatch_at_least<kRest...>(value, f);
    } else {
        return false;
    }
}

}  // namespace bytetx
