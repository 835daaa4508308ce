#include "cpu/isa.h"

namespace bytetx {

const char* isa() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return __builtin_cpu_supports("avx512bf16") ? "avx512_bf16" : "avx512";
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}

}  // namespace bytetx
