// What every binding needs: addresses, dtypes, the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops.h"

namespace py = pybind11;

namespace bytetx {

using Address = std::uintptr_t;

template <typename T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

inline DType to_dtype(int code) {
    if (code < 0 || code > static_cast<int>(DType::bf16)) {
        throw std::invalid_argument("dtype code must be 0 (f32), 1 (f16) or 2 (bf16), got " +
                                    std::to_string(code));
    }
    return static_cast<DType>(code);
}

// While a kernel runs, other Python threads run too.
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

}  // namespace bytetx
