// From operands to a launch: tensor maps, the problem, the grid.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/launch.cuh"
#include "common/tensor_map.cuh"
#include "gemm/kernel.cuh"
#include "ops.h"

namespace bytetx::gemm {

// Rows of 16-bit elements, one behind the other.
struct Matrix {
    const char* op;  // for errors
    CUtensorMapDataType type;
    const void* data;
    int64_t rows, columns;
};

inline CUtensorMapDataType map_type(DType dtype) {
    return dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline Matrix matrix(const LinearParams& o, const void* data, int64_t rows, int64_t columns) {
    return {"linear", map_type(o.dtype), data, rows, columns};
}

inline CUtensorMap encode_map(const Matrix& x, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box,
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status =
        tensor_map_encoder()(&map, x.type, rank, const_cast<void*>(x.data), sizes, strides, box,
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::invalid_argument(std::string(x.op) + ": no tensor map (CUresult " +
                                    std::to_string(status) + ") of " + std::to_string(x.rows) +
                                    " rows of " + std::to_string(x.columns) + " 16-bit elements");
    }
    return map;
}

// Boxes of 64 columns; rows and columns that x does not have read as zero.
inline CUtensorMap make_map(const Matrix& x, int box_rows) {
    const cuuint64_t sizes[2] = {cuuint64_t(x.columns), cuuint64_t(x.rows)};
    const cuuint64_t strides[1] = {cuuint64_t(x.columns) * kElementBytes};
    const cuuint32_t box[2] = {kBlockK, cuuint32_t(box_rows)};
    return encode_map(x, 2, sizes, strides, box);
}

// Row 32 q + 8 t + 2 i + e of b, read in the order q, i, t, e (see kPermutedRows).
inline CUtensorMap make_permuted_map(const Matrix& b, int box_rows) {
    const auto row_bytes = cuuint64_t(b.columns) * kElementBytes;
    const cuuint64_t sizes[5] = {cuuint64_t(b.columns), 2, 4, 4,
                                 cuuint64_t(b.rows / kPermutedRows)};
    const cuuint64_t strides[4] = {row_bytes, 8 * row_bytes, 2 * row_bytes,
                                   kPermutedRows * row_bytes};
    const cuuint32_t box[5] = {kBlockK, 2, 4, 4, cuuint32_t(box_rows / kPermutedRows)};
    return encode_map(b, 5, sizes, strides, box);
}

inline int num_tiles(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

// a [m, columns], b [n, columns]. The CTAs of a cluster work on tiles below one another.
template <typename C>
Problem make_problem(const Matrix& a, const Matrix& b, void* d) {
    Problem p{};
    p.a = make_map(a, C::kTileM);
    p.b = make_permuted_map(b, C::kTileN / C::kClusterCtas);
    p.d = d;
    p.m = static_cast<int>(a.rows);
    p.n = static_cast<int>(b.rows);
    p.num_k_blocks = num_tiles(a.columns, kBlockK);
    p.tiles_m = num_tiles(a.rows, C::kTileM * C::kClusterCtas);
    p.tiles_n = num_tiles(b.rows, C::kTileN);
    return p;
}

template <typename C>
Problem make_problem(const LinearParams& o) {
    return make_problem<C>(matrix(o, o.a, o.m, o.k), matrix(o, o.b, o.n, o.k), o.d);
}

// Weights of so many bytes stay in L2 while one row of tiles after the other reads all of them. Of
// larger ones a wave of CTAs along n reads nearly all again, from HBM: that takes power from the
// matrix unit, and with E4M3 more bytes than HBM delivers. In bands of so many rows a wave reads
// about as many rows of a as columns of b.
constexpr int64_t kMostBytesInL2 = 24 << 20;
constexpr int kRasterRows = 2048;

// Up to `most_rows` of a its tiles go along n, too.
template <typename C>
RasterOrder choose_raster(const Problem& p, int most_rows) {
    const int64_t b_rows = int64_t{p.tiles_n} * C::kTileN;
    const bool fits_l2 = b_rows * p.num_k_blocks * kBlockK * kElementBytes <= kMostBytesInL2;
    if (fits_l2 || p.m <= most_rows) return {0, 1};
    return {0, std::max(1, kRasterRows / (C::kTileM * C::kClusterCtas))};
}

// An instance of the kernel.
template <typename C_, template <typename> typename Scheduler_, typename Producer,
          typename Epilogue>
struct Kernel {
    using C = C_;
    using Scheduler = Scheduler_<C>;
    using Params = gemm::Params<C, Scheduler, Producer, Epilogue>;
    using Smem = gemm::Smem<C, Producer, Epilogue>;
    static constexpr auto kFunction = gemm_kernel<C, Scheduler, Producer, Epilogue>;
};

// Clusters that fit the device at once: those of four and more CTAs leave some SMs unused.
template <typename K>
int max_clusters() {
    using C = typename K::C;
    constexpr int kSmemBytes = sizeof(typename K::Smem);
    static_assert(kSmemBytes <= kMostSmemBytes);
    allow_smem_once<K::kFunction>(kSmemBytes);
    const auto count_clusters = [] {
        if (C::kClusterCtas == 1) return num_sms();
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = C::kClusterCtas;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(num_sms() / C::kClusterCtas * C::kClusterCtas);
        config.blockDim = dim3(C::kThreads);
        config.dynamicSmemBytes = static_cast<size_t>(kSmemBytes);
        config.attrs = &cluster;
        config.numAttrs = 1;
        int count = 0;
        BYTETX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, K::kFunction, &config));
        return count;
    };
    static const int most = count_clusters();
    return most;
}

template <typename K>
void launch_clusters(const typename K::Params& p, int num_clusters, cudaStream_t stream) {
    using C = typename K::C;
    launch_kernel(K::kFunction,
                  {dim3(num_clusters * C::kClusterCtas), dim3(C::kThreads),
                   sizeof(typename K::Smem), stream, C::kClusterCtas},
                  p);
}

template <typename K>
void launch_persistent(const typename K::Params& p, cudaStream_t stream) {
    launch_clusters<K>(p, std::min(max_clusters<K>(), p.tiles_m * p.tiles_n), stream);
}

}  // namespace bytetx::gemm
