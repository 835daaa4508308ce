#include "cpu/isa.h"

#include <stdexcept>
#include <string>

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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

#if defined(__x86_64__)
namespace {

#if defined(__linux__)
// Whether the system saves the tiles of a thread, and this process and its children may use them:
// Linux gives each thread room for them only after it was asked to. It refuses where a thread's
// stack for signals is too small for them.
bool may_use_tiles() {
    constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;
    constexpr unsigned kTileConfig = 17;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 27 & 1)) return false;  // OSXSAVE
    unsigned saved, high;
    asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!(saved >> kTileConfig & 1) || !(saved >> kTileData & 1)) return false;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
    uint64_t permitted = 0;
    return syscall(SYS_arch_prctl, kGetPermission, &permitted) == 0 && (permitted >> kTileData & 1);
}

// Only beside AVX-512 with VNNI and bf16, which the kernels' other instructions are.
Isa tile_isa() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return Isa::portable;
    const bool has_tiles = edx >> 24 & 1, has_int8 = edx >> 25 & 1;
    return has_tiles && has_int8 && may_use_tiles() ? Isa::amx_int8 : Isa::portable;
}
#else
Isa tile_isa() { return Isa::portable; }
#endif

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
        const bool is_slow = has(found, Isa::avx512_bf16) && __builtin_cpu_is("intel");
        if (is_slow) found = found | Isa::slow_bf16_dot;
        if (has(found, Isa::avx512_vnni | Isa::avx512_bf16)) found = found | tile_isa();
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
    if (has(set, Isa::amx_int8)) return "amx_int8";
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
