// linear with what comes next: see ops.h, whose types it uses.
#pragma once

#include "ops.h"

namespace bytetx {

// cuda only. Tilings for few rows, which wait for weights more than they multiply, start the next
// product's on their way into L2.
struct LinearCall : LinearParams {
    const void* ahead;  // read only, 16-byte aligned, or null
    int64_t ahead_bytes;  // a multiple of 16
};

void linear(const LinearCall& p, const Launch& launch);

}  // namespace bytetx
