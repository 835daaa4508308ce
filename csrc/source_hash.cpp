// Holds the hash of csrc/. A file of its own: it is compiled again after every edit of any source.
#include "source_hash.h"

namespace bytetx {

const char* source_hash() { return BYTETX_SOURCE_HASH; }

}  // namespace bytetx
