// From operands to a launch of the GEMM that norms its rows.
#pragma once

#include "cuda/linear_launch.cuh"
#include "cuda/linear_norm_kernel.cuh"
#include "linear_norm_ops.h"

namespace bytetx::gemm {

// Boxes of kTileN / 32 times 32 columns, one behind the other; absent rows read as zero.
template <typename C>
CUtensorMap make_residual_map(const LinearNormParams& o) {
    const cuuint64_t sizes[3] = {kPermutedRows, cuuint64_t(o.m), cuuint64_t(o.n / kPermutedRows)};
    const cuuint64_t strides[2] = {cuuint64_t(o.n) * kElementBytes, kPermutedRows * kElementBytes};
    const cuuint32_t box[3] = {kPermutedRows, C::kTileM, C::kTileN / kPermutedRows};
    const cuuint32_t steps[3] = {1, 1, 1};
    CUtensorMap map;
    const CUresult status = tensor_map_encoder()(
        &map,
        o.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        3, const_cast<void*>(o.residual), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::invalid_argument("linear_norm: no tensor map of the residual (CUresult " +
                                    std::to_string(status) + ")");
    }
    return map;
}

template <typename C>
RowNormParams make_row_norm_params(const LinearNormParams& o) {
    LinearParams operands{};
    operands.a = o.a;
    operands.b = o.b;
    operands.m = o.m;
    operands.n = o.n;
    operands.k = o.k;
    operands.dtype = o.dtype;
    RowNormParams p{};
    p.a = make_a_map(operands, C::kTileM / C::kClusterCtas);
    p.b = make_b_map(operands, C::kTileN);
    p.residual_map = make_residual_map<C>(o);
    p.bias = o.bias;
    p.residual = o.residual;
    p.d = o.d;
    p.m = static_cast<int>(o.m);
    p.n = static_cast<int>(o.n);
    p.num_k_blocks = static_cast<int>((o.k + kBlockK - 1) / kBlockK);
    p.tiles_m = static_cast<int>((o.m + C::kTileM - 1) / C::kTileM);
    p.tiles_n = 1;
    p.weight = o.weight;
    p.shift = o.shift;
    p.workspace = static_cast<uint64_t*>(o.workspace);
    p.eps = o.eps;
    return p;
}

template <typename C>
void launch_row_norm(const LinearNormParams& o, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(RowNormSmem<C>);
    static_assert(kSmemBytes <= 227 * 1024);
    const auto kernel = gemm_row_norm_kernel<C>;
    allow_smem(kernel, kSmemBytes);
    static const int most = max_clusters<C>(kernel, kSmemBytes) / C::kParts;  // groups of them
    if (most == 0) throw std::runtime_error("linear_norm: no group of clusters fits the device");
    const RowNormParams p = make_row_norm_params<C>(o);
    const int ctas = std::min(most, p.tiles_m) * C::kGroupCtas;
    launch_kernel(kernel, {dim3(ctas), dim3(C::kThreads), kSmemBytes, stream, C::kClusterCtas}, p);
}

// The body of a width's launcher.
template <typename Tile>
void launch_row_norm_tiling(const LinearNormParams& o, cudaStream_t stream) {
    if (o.dtype == DType::f16) return launch_row_norm<Config<cutlass::half_t, Tile>>(o, stream);
    launch_row_norm<Config<cutlass::bfloat16_t, Tile>>(o, stream);
}

}  // namespace bytetx::gemm
