// Shared by the rotary operation and decode steps.
#pragma once

#include <cstdint>

#include "cache_ops.h"

namespace bytetx::cpu {

// Throws std::invalid_argument where p is not what it says.
void check_rotary(const RotaryParams& p);

// Rows [begin, end), of checked parameters.
void turn_rows(const RotaryParams& p, int64_t begin, int64_t end);

}  // namespace bytetx::cpu
