// Scores of a query and documents by their tokens' vectors: the part of ops.h that only cuda
// implements.
#pragma once

#include <cstdint>

#include "ops.h"

namespace bytetx {

// cuda only. scores[i] = sum over the query's vectors of the largest product with a vector of
// document i, in f32, over divisor; NaN where a product is.
struct MaxsimOfOneParams {
    const void* query;            // [num_vectors, size], dtype, contiguous and 16-byte aligned
    const void* documents;        // [cu_documents[num_documents], size], likewise
    const int64_t* cu_documents;  // host: [num_documents + 1], read before the call returns
    float* scores;                // [num_documents]
    int32_t num_vectors;          // 1 to 64
    int32_t size;                 // 32, 64, 96 or 128
    int64_t num_documents;
    float divisor;
    float empty_score;  // score of a document without vectors
    DType dtype;        // f16 or bf16
};

void maxsim_of_one(const MaxsimOfOneParams& p, const Launch& launch);

}  // namespace bytetx
