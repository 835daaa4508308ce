// Which sources a module was compiled from.
#pragma once

namespace bytetx {

// The hash of csrc/ that setup.py computed (bytetx/ops/native_modules.py says how), as hex digits.
// Python compares it with the sources at hand before it loads a module from another folder.
const char* source_hash();

}  // namespace bytetx
