#include "cpu/isa.h"

#include <stdexcept>
#include <string>

namespace bytetx::cpu {

Isa best_isa() {
#if defined(__x86_64__)
    static const Isa isa = [] {
        __builtin_cpu_init();
        const bool has_avx512 =
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        if (has_avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::avx512_bf16;
        if (has_avx512) return Isa::avx512;
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        return has_avx2 ? Isa::avx2 : Isa::portable;
    }();
    return isa;
#else
    return Isa::portable;
#endif
}

Isa resolve_isa(Isa wanted) {
    const Isa best = best_isa();
    if (wanted == Isa::automatic) return best;
    if (wanted < Isa::automatic || wanted > best) {
        const std::string code = std::to_string(static_cast<int>(wanted));
        throw std::invalid_argument("isa must be one that this machine has, at most " +
                                    std::string(isa_name(best)) + ", got code " + code);
    }
    return wanted;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::automatic:
            return "auto";
        case Isa::portable:
            return "portable";
        case Isa::avx2:
            return "avx2";
        case Isa::avx512:
            return "avx512";
        case Isa::avx512_bf16:
            return "avx512_bf16";
    }
    throw std::invalid_argument("isa is not a value of bytetx::Isa");
}

}  // namespace bytetx::cpu
