// Which instruction set a kernel runs with.
#pragma once

#include "ops.h"

namespace bytetx::cpu {

// The best set that this processor, its operating system and this build have.
Isa best_isa();

// `wanted`, or best_isa() for Isa::automatic. Throws std::invalid_argument where the machine lacks
// it.
Isa resolve_isa(Isa wanted);

const char* isa_name(Isa isa);

}  // namespace bytetx::cpu
