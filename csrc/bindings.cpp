// The only file that knows Python. It is compiled twice: as _cpu, and with BYTETX_CUDA as _cuda.
// Tensors arrive as addresses that bytetx/ops/ has checked; every function ends in the same three
// arguments (device, stream, num_threads), which make a Launch.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops.h"

#ifndef BYTETX_CUDA
#include "cpu/isa.h"
#endif

namespace py = pybind11;

namespace bytetx {
namespace {

using Address = std::uintptr_t;

template <typename T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

#ifdef BYTETX_CUDA
DType to_dtype(int code) {
    if (code < 0 || code > static_cast<int>(DType::bf16)) {
        throw std::invalid_argument("dtype code must be 0 (f32), 1 (f16) or 2 (bf16), got " +
                                    std::to_string(code));
    }
    return static_cast<DType>(code);
}

void bind_layer_norm(py::module_& m) {
    m.def("layer_norm", [](Address x, Address residual, Address out, Address weight, Address bias,
                           int64_t total_tokens, int64_t hidden_size, float eps, int dtype,
                           int device, Address stream, int num_threads) {
        layer_norm({pointer(x), pointer(residual), pointer(out), pointer(weight), pointer(bias),
                    total_tokens, hidden_size, eps, to_dtype(dtype)},
                   {device, pointer(stream), num_threads});
    });
}
#endif

}  // namespace
}  // namespace bytetx

PYBIND11_MODULE(BYTETX_MODULE, m) {
#ifdef BYTETX_CUDA
    m.attr("arch") = "sm_90a";
    bytetx::bind_layer_norm(m);
#else
    m.def("isa", &bytetx::isa);
#endif
}
