// Documents cut into tiles of vectors, as the Triton kernel of many queries takes them.
#pragma once

#include <cstdint>

namespace bytetx::cpu {

// Numbers that maxsim_tiles() writes at most, for so many documents of so many vectors together.
inline int64_t maxsim_tiles_size(int64_t num_documents, int64_t num_vectors, int64_t tile) {
    return num_documents + 1 + 3 * (num_documents + num_vectors / tile);
}

// Writes, one behind the other: first_tiles [num_documents + 1], the tiles before each document,
// and of each tile begins, ends (its vectors) and finished (the document that it is the last of, or
// -1). cu_documents: [num_documents + 1], rising from 0; what fits int32. Returns the number of
// tiles.
int64_t maxsim_tiles(const int64_t* cu_documents, int64_t num_documents, int64_t tile,
                     int32_t* out);

}  // namespace bytetx::cpu
