// linear_norm(): which instance of the kernel runs, and its launch.
#pragma once

#include "gemm/launch.cuh"
#include "gemm/launchers.h"
#include "gemm/row_norm_epilogue.cuh"

namespace bytetx::gemm {

// Boxes of kTileN / 32 times 32 columns, one behind the other; absent rows read as zero.
template <typename C>
CUtensorMap make_grouped_map(const Matrix& x) {
    const cuuint64_t sizes[3] = {kPermutedRows, cuuint64_t(x.rows),
                                 cuuint64_t(x.columns / kPermutedRows)};
    const cuuint64_t strides[2] = {cuuint64_t(x.columns) * kElementBytes,
                                   kPermutedRows * kElementBytes};
    const cuuint32_t box[3] = {kPermutedRows, C::kTileM, C::kTileN / kPermutedRows};
    return encode_map(x, 3, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <typename C>
void launch_row_norm(const LinearNormParams& o, cudaStream_t stream) {
    using Epilogue = RowNormEpilogue<C>;
    using K = Kernel<C, RowScheduler, SharedRowsProducer<C, Epilogue>, Epilogue>;
    const auto matrix = [&](const void* data, int64_t rows, int64_t columns) {
        return Matrix{"linear_norm", map_type(o.dtype), data, rows, columns};
    };
    typename K::Params p{};
    p.a = make_map(matrix(o.a, o.m, o.k), C::kTileM / C::kClusterCtas);
    p.b = make_permuted_map(matrix(o.b, o.n, o.k), C::kTileN);
    p.d = o.d;
    p.m = static_cast<int>(o.m);
    p.n = static_cast<int>(o.n);
    p.num_k_blocks = num_tiles(o.k, kBlockK);
    p.tiles_m = num_tiles(o.m, C::kTileM);
    p.tiles_n = 1;
    p.epilogue = {make_grouped_map<C>(matrix(o.residual, o.m, o.n)),
                  o.bias,
                  o.weight,
                  o.shift,
                  static_cast<uint64_t*>(o.workspace),
                  o.eps};
    const int groups = max_clusters<K>() / C::kParts;
    if (groups == 0) throw std::runtime_error("linear_norm: no group of clusters fits the device");
    launch_clusters<K>(p, std::min(groups, p.tiles_m) * C::kParts, stream);
}

template <typename Tile>
void launch_linear_norm(const LinearNormParams& o, cudaStream_t stream) {
    if (o.dtype == DType::f16) return launch_row_norm<Config<Half, Tile>>(o, stream);
    launch_row_norm<Config<BFloat16, Tile>>(o, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_linear_norm<RowNorm384>(const LinearNormParams& p, cudaStream_t stream);
extern template void launch_linear_norm<RowNorm384Short>(const LinearNormParams& p,
                                                         cudaStream_t stream);

extern template void launch_linear_norm<RowNorm768>(const LinearNormParams& p, cudaStream_t stream);

extern template void launch_linear_norm<RowNorm1024>(const LinearNormParams& p,
                                                     cudaStream_t stream);

}  // namespace bytetx::gemm
