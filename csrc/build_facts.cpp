// Holds what setup.py says. A file of its own: it is compiled again after every edit of any source.
#include "build_facts.h"

namespace bytetx {

const char* source_hash() { return BYTETX_SOURCE_HASH; }

const char* why_no_cuda() { return BYTETX_WHY_NO_CUDA; }

}  // namespace bytetx
