// The 8-bit linear layer of csrc/cpu as a library whose kernel runs on emulated tiles.
#include <cstring>
#include <exception>

#include "cpu/isa.h"
#include "int8_ops.h"

namespace bytetx::cpu {

Isa machine_isa() {
    return Isa::portable | Isa::avx2 | Isa::avx512 | Isa::avx512_vnni | Isa::avx512_bf16 |
           Isa::amx_int8;
}
Isa resolve_isa(Isa) { return machine_isa(); }

}  // namespace bytetx::cpu

// Null, or what was wrong, until the next call.
template <typename Call>
static const char* said(Call call) {
    static char text[256];
    try {
        call();
        return nullptr;
    } catch (const std::exception& error) {
        return std::strncpy(text, error.what(), sizeof(text) - 1);
    }
}

extern "C" {

int64_t int8_linear_workspace_bytes(int64_t m, int64_t k, int num_threads) {
    return bytetx::int8_linear_workspace_bytes(m, k, num_threads);
}

const char* int8_linear(const void* x, const uint8_t* weight, const float* weight_scale,
                        const float* weight_sum, const float* bias, void* d, void* workspace,
                        int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int activation,
                        int dtype, int num_threads) {
    const bytetx::Int8LinearParams params{.x = x,
                                          .weight = weight,
                                          .weight_scale = weight_scale,
                                          .weight_sum = weight_sum,
                                          .bias = bias,
                                          .d = d,
                                          .workspace = workspace,
                                          .workspace_bytes = workspace_bytes,
                                          .m = m,
                                          .n = n,
                                          .k = k,
                                          .activation = bytetx::Activation(activation),
                                          .dtype = bytetx::DType(dtype)};
    return said([&] { bytetx::int8_linear(params, {-1, nullptr, num_threads, {}}); });
}
}
