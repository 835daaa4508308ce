// How many rows of a linear layer on tiles share a pass over the weight.
#pragma once

#include <cstdint>

namespace bytetx::cpu {

// The staged rows stay in L2 (2 MiB a core on the processors that have tiles), and the more there
// are, the fewer times the weight comes from L3.
constexpr int64_t kStagedBytes = int64_t{768} << 10;
constexpr int64_t kMostStagedRows = 256;
constexpr int64_t kLeastStagedRows = 32;

// row_bytes: of a row as it is staged.
inline int64_t staged_rows(int64_t row_bytes) {
    const int64_t fitting = kStagedBytes / row_bytes / kLeastStagedRows * kLeastStagedRows;
    if (fitting < kLeastStagedRows) return kLeastStagedRows;
    return fitting < kMostStagedRows ? fitting : kMostStagedRows;
}

// row_bytes rounded up to whole rows of tiles.
inline int64_t staged_row_bytes(int64_t row_bytes) { return (row_bytes + 63) / 64 * 64; }

}  // namespace bytetx::cpu
