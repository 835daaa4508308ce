// TMA maps of attention's operands.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/tensor_map.cuh"
#include "cuda/attention_mma.cuh"
#include "ops.h"

namespace bytetx::attention {

// A map whose boxes land swizzled as C's tiles are; what lies outside is zero. strides: bytes, of
// all but the first dimension.
template <typename C, int kRank>
CUtensorMap encode_map(DType dtype, const void* rows, const cuuint64_t (&sizes)[kRank],
                       const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
    cuuint32_t steps[kRank];
    for (auto& step : steps) step = 1;
    CUtensorMap map;
    const CUresult status = tensor_map_encoder()(
        &map,
        dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        kRank, const_cast<void*>(rows), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        C::kBoxColumns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        std::string text;
        for (int i = 0; i < kRank; ++i) {
            text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
            if (i > 0) text += " every " + std::to_string(strides[i - 1]) + " bytes";
        }
        throw std::invalid_argument("attention: no tensor map (CUresult " + std::to_string(status) +
                                    ") of " + text);
    }
    return map;
}

// Boxes of box_rows token rows and C::kBoxColumns features of one head. stride: elements from row
// to row.
template <typename C>
CUtensorMap make_map(DType dtype, const void* rows, int64_t stride, int64_t num_rows, int num_heads,
                     int head_dim, int box_rows) {
    const cuuint64_t sizes[3] = {cuuint64_t(head_dim), cuuint64_t(num_heads), cuuint64_t(num_rows)};
    const cuuint64_t strides[2] = {cuuint64_t(head_dim) * kElementBytes,
                                   cuuint64_t(stride) * kElementBytes};
    const cuuint32_t box[3] = {C::kBoxColumns, 1, cuuint32_t(box_rows)};
    return encode_map<C>(dtype, rows, sizes, strides, box);
}

}  // namespace bytetx::attention
