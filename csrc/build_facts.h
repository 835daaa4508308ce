// Facts that setup.py knew when it compiled a module.
#pragma once

namespace bytetx {

// The hash of csrc/ (bytetx/ops/native_modules.py says how), as hex digits. Python compares it with
// the sources at hand before it loads a module from another folder.
const char* source_hash();

// Why _cuda was not built beside it and what to do about it; empty where it was.
const char* why_no_cuda();

}  // namespace bytetx
