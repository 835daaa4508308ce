// From FP8 operands to a launch: tensor maps of E4M3, the instance of the kernel.
#pragma once

#include "common/tensor_map.cuh"  // first: CUTLASS includes cuda.h in a way that hides its types
#include "cuda/fp8_linear_kernel.cuh"
#include "cuda/linear_launch.cuh"
#include "ops.h"

namespace bytetx::gemm {

// Boxes of 128 features; otherwise as make_a_map and make_b_map, whose elements are pairs here.
inline CUtensorMap encode_fp8_map(const Fp8LinearParams& o, const void* data, int rank,
                                  const cuuint64_t* sizes, const cuuint64_t* strides,
                                  const cuuint32_t* box) {
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status = tensor_map_encoder()(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, rank, const_cast<void*>(data), sizes, strides, box,
        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::invalid_argument("fp8_linear: no tensor map (CUresult " +
                                    std::to_string(status) +
                                    ") for m, n, k = " + std::to_string(o.m) + ", " +
                                    std::to_string(o.n) + ", " + std::to_string(o.k));
    }
    return map;
}

inline CUtensorMap make_fp8_a_map(const Fp8LinearParams& o, int box_rows) {
    const cuuint64_t sizes[2] = {cuuint64_t(o.k / 2), cuuint64_t(o.m)};
    const cuuint64_t strides[1] = {cuuint64_t(o.k)};
    const cuuint32_t box[2] = {kBlockK, cuuint32_t(box_rows)};
    return encode_fp8_map(o, o.a, 2, sizes, strides, box);
}

inline CUtensorMap make_fp8_b_map(const Fp8LinearParams& o, int box_rows) {
    const auto row_bytes = cuuint64_t(o.k);
    const cuuint64_t sizes[5] = {cuuint64_t(o.k / 2), 2, 4, 4, cuuint64_t(o.n / kPermutedRows)};
    const cuuint64_t strides[4] = {row_bytes, 8 * row_bytes, 2 * row_bytes,
                                   kPermutedRows * row_bytes};
    const cuuint32_t box[5] = {kBlockK, 2, 4, 4, cuuint32_t(box_rows / kPermutedRows)};
    return encode_fp8_map(o, o.b, 5, sizes, strides, box);
}

template <typename C>
Fp8Params make_fp8_params(const Fp8LinearParams& o) {
    const auto tiles = [](int64_t size, int tile) { return int((size + tile - 1) / tile); };
    Fp8Params p{};
    p.a = make_fp8_a_map(o, C::kTileM);
    p.b = make_fp8_b_map(o, C::kTileN / C::kClusterCtas);

    p.d = o.d;
    p.m = static_cast<int>(o.m);
    p.n = static_cast<int>(o.n);
    p.num_k_blocks = tiles(o.k, C::kFeatures);
    p.tiles_m = tiles(o.m, C::kTileM * C::kClusterCtas);
    p.tiles_n = tiles(o.n, C::kTileN);
    p.activation = activation_constants(o.activation);
    p.a_scale = o.a_scale;
    p.b_scale = o.b_scale;
    p.float_bias = o.bias;
    p.inverse_d_scale = 1.0f / o.d_scale;
    p.raster = choose_raster<C>(p, 0);
    return p;
}

template <typename C, Epilogue kEpilogue, typename Out>
void launch_fp8(const Fp8LinearParams& o, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(Smem<C>);
    static_assert(kSmemBytes <= 227 * 1024);
    const Fp8Params p = make_fp8_params<C>(o);
    const auto kernel = gemm_fp8_kernel<C, kEpilogue, Out>;
    allow_smem(kernel, kSmemBytes);
    static const int most = max_clusters<C>(kernel, kSmemBytes);
    const int num_clusters = std::min(most, p.tiles_m * p.tiles_n);
    launch_kernel(kernel,
                  {dim3(num_clusters * C::kClusterCtas), dim3(C::kThreads), kSmemBytes, stream,
                   C::kClusterCtas},
                  p);
}

template <typename C, typename Out>
void launch_fp8_epilogue(const Fp8LinearParams& o, cudaStream_t stream) {
    if (o.activation == Activation::gelu) return launch_fp8<C, Epilogue::erf, Out>(o, stream);
    if (o.activation == Activation::none || o.activation == Activation::relu) {
        return launch_fp8<C, Epilogue::linear, Out>(o, stream);
    }
    launch_fp8<C, Epilogue::sigmoid, Out>(o, stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_fp8_tiling(const Fp8LinearParams& o, cudaStream_t stream) {
    using C = Fp8Config<Tile>;
    if (o.is_d_fp8) return launch_fp8_epilogue<C, cutlass::float_e4m3_t>(o, stream);
    if (o.dtype == DType::f16) return launch_fp8_epilogue<C, cutlass::half_t>(o, stream);
    launch_fp8_epilogue<C, cutlass::bfloat16_t>(o, stream);
}

}  // namespace bytetx::gemm
