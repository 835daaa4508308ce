// Which instructions a kernel may use.
#pragma once

#include "ops.h"

namespace bytetx::cpu {

constexpr Isa operator|(Isa a, Isa b) {
    return static_cast<Isa>(static_cast<int>(a) | static_cast<int>(b));
}

constexpr bool has(Isa set, Isa wanted) { return (set | wanted) == set; }

// The instructions that this processor, its operating system and this build have.
Isa machine_isa();

// `wanted`, or machine_isa() for Isa::automatic. Throws std::invalid_argument where the machine
// lacks some of it.
Isa resolve_isa(Isa wanted);

// The name of the set's newest instructions.
const char* isa_name(Isa set);

}  // namespace bytetx::cpu
