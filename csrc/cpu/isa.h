// What this processor can run.
#pragma once

namespace bytetx {

// "avx512_bf16", "avx512", "avx2" or "portable": the best set of kernels that is both compiled in
// and supported by the processor and its operating system.
const char* isa();

}  // namespace bytetx
