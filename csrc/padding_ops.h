// A padded batch to packed rows and back: the part of ops.h that only cuda implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// cuda only. An integer or floating matrix whose columns are contiguous.
struct PaddedMatrix {
    const void* data;    // null for none
    int64_t row_stride;  // elements from one row to the next; 0 where one row stands for all
    int32_t item_bytes;  // 1, 2, 4 or 8; ids: 4 or 8
    bool is_float;       // then -0 is zero, too
};

// cuda only. For each row: counts[0] its non-zero elements, [1] the runs of them, [2] whether its
// first is one.
struct CountTokensParams {
    PaddedMatrix mask;
    int32_t* counts;  // [3, num_rows]
    int64_t num_rows;
    int64_t num_columns;
};

// cuda only. See bytetx/ops/padding.py.
struct PackPaddedParams {
    PaddedMatrix input_ids;
    PaddedMatrix mask;            // none: every place is a token
    PaddedMatrix token_type_ids;  // none: zeros
    PaddedMatrix position_ids;    // none: counted, from position_offset on
    const int32_t* seqlens;       // [num_rows], or null: each row counts those before it
    int32_t* cu_seqlens;          // [num_sequences + 1]
    int32_t* packed_ids;          // [num_tokens]
    int32_t* packed_positions;    // [num_tokens]
    int32_t* packed_types;        // [num_tokens], or null
    int32_t* rows;                // [num_rows, num_columns], or null without a mask
    int32_t* bad_ids;             // [3], or null
    int64_t num_rows;
    int64_t num_columns;
    int64_t num_texts;
    int64_t num_sequences;
    int64_t num_tokens;
    int64_t filler_tokens;
    int32_t position_offset;
    int32_t num_words;  // rows of the tables that ids are for; 0 for no table
    int32_t num_positions;
    int32_t num_types;
};

// cuda only. out[i] = x[rows[i]], zeros where rows[i] is negative.
struct UnpackPaddedParams {
    const void* x;        // [num_tokens, row_bytes], contiguous
    const int32_t* rows;  // [num_places]
    void* out;            // [num_places, row_bytes]
    int64_t num_places;
    int64_t row_bytes;  // a multiple of 2
};

void count_tokens(const CountTokensParams& p, const Launch& launch);
void pack_padded(const PackPaddedParams& p, const Launch& launch);
void unpack_padded(const UnpackPaddedParams& p, const Launch& launch);

}  // namespace bytetx
