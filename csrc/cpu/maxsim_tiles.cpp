#include "cpu/maxsim_tiles.h"

#include <algorithm>

namespace bytetx::cpu {

int64_t maxsim_tiles(const int64_t* cu_documents, int64_t num_documents, int64_t tile,
                     int32_t* out) {
    int64_t num_tiles = 0;
    for (int64_t i = 0; i < num_documents; ++i) {
        out[i] = static_cast<int32_t>(num_tiles);
        num_tiles += (cu_documents[i + 1] - cu_documents[i] + tile - 1) / tile;
    }
    out[num_documents] = static_cast<int32_t>(num_tiles);
    int32_t* begins = out + num_documents + 1;
    int32_t *ends = begins + num_tiles, *finished = ends + num_tiles;
    for (int64_t i = 0; i < num_documents; ++i) {
        const int64_t end = cu_documents[i + 1];
        for (int64_t at = cu_documents[i]; at < end; at += tile) {
            *begins++ = static_cast<int32_t>(at);
            *ends++ = static_cast<int32_t>(std::min(at + tile, end));
            *finished++ = at + tile < end ? -1 : static_cast<int32_t>(i);
        }
    }
    return num_tiles;
}

}  // namespace bytetx::cpu
