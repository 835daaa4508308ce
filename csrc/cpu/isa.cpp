#include "cpu/isa.h"

#include <stdexcept>
#include <string>

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace bytetx::cpu {

#if defined(__aarch64__)
namespace {

#if defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

Isa arm_isa() {
#if defined(__APPLE__)
    const bool has_dotprod = has_feature("hw.optional.arm.FEAT_DotProd");
    const bool has_i8mm = has_feature("hw.optional.arm.FEAT_I8MM");
    const bool has_bf16 = has_feature("hw.optional.arm.FEAT_BF16");
#else
    // HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16, which headers of an older glibc lack.
    const bool has_dotprod = getauxval(AT_HWCAP) >> 20 & 1;
    const bool has_i8mm = getauxval(AT_HWCAP2) >> 13 & 1;
    const bool has_bf16 = getauxval(AT_HWCAP2) >> 14 & 1;
#endif
    Isa found = Isa::portable | Isa::neon;  // which every 64-bit ARM has
    if (has_dotprod) found = found | Isa::neon_dotprod;
    if (has_i8mm) found = found | Isa::neon_i8mm;
    if (has_bf16) found = found | Isa::neon_bf16;
    return found;
}

}  // namespace
#endif

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
#elif defined(__aarch64__)
    static const Isa isa = arm_isa();
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
    if (has(set, Isa::neon_bf16)) return "neon_bf16";
    if (has(set, Isa::neon_i8mm)) return "neon_i8mm";
    if (has(set, Isa::neon_dotprod)) return "neon_dotprod";
    if (has(set, Isa::neon)) return "neon";
    return "portable";
}

}  // namespace bytetx::cpu
