#include "cpu/isa.h"

#include <stdexcept>
#include <string>

namespace bytetx::cpu {

Isa machine_isa() {
#if defined(__x86_64__)
    static const Isa isa = [] {
        __builtin_cpu_init();
        Isa found = Isa::portable;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            found = found | Isa::avx2;
        }
        if (has(found, Isa::avx2) && __builtin_cpu_supports("avx512f") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl")) {
            found = found | Isa::avx512;
            if (__builtin_cpu_supports("avx512vnni")) found = found | Isa::avx512_vnni;
            if (__builtin_cpu_supports("avx512bf16")) found = found | Isa::avx512_bf16;
        }
        return found;
    }();
    return isa;
#else
    return Isa::portable;
#endif
}

Isa resolve_isa(Isa wanted) {
    const Isa machine = machine_isa();
    if (wanted == Isa::automatic) return machine;
    if (!has(machine, wanted) || !has(wanted, Isa::portable)) {
        throw std::invalid_argument(
            "isa must be a set of instructions that this machine has, which are " +
            std::to_string(static_cast<int>(machine)) + " with " + isa_name(machine) + ", got " +
            std::to_string(static_cast<int>(wanted)));
    }
    return wanted;
}

const char* isa_name(Isa set) {
    if (has(set, Isa::avx512_bf16)) return "avx512_bf16";
    if (has(set, Isa::avx512_vnni)) return "avx512_vnni";
    if (has(set, Isa::avx512)) return "avx512";
    if (has(set, Isa::avx2)) return "avx2";
    return "portable";
}

}  // namespace bytetx::cpu
