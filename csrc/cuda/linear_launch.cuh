// From operands to a launch: tensor maps, grid, the instance of the kernel.
#pragma once

#include <algorithm>
#include <limits>

#include "common/launch.cuh"
#include "common/tensor_map.cuh"
#include "cuda/linear_kernel.cuh"
#include "cuda/linear_residual.cuh"
#include "cuda/linear_small_m.cuh"
#include "ops.h"

namespace bytetx::gemm {

inline CUtensorMap encode_map(const LinearParams& o, const void* data, int rank,
                              const cuuint64_t* sizes, const cuuint64_t* strides,
                              const cuuint32_t* box) {
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status = tensor_map_encoder()(
        &map,
        o.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::invalid_argument("linear: no tensor map (CUresult " + std::to_string(status) +
                                    ") for m, n, k = " + std::to_string(o.m) + ", " +
                                    std::to_string(o.n) + ", " + std::to_string(o.k));
    }
    return map;
}

// Boxes of 64 features of a; rows and features that a does not have read as zero.
inline CUtensorMap make_a_map(const LinearParams& o, int box_rows) {
    const cuuint64_t sizes[2] = {cuuint64_t(o.k), cuuint64_t(o.m)};
    const cuuint64_t strides[1] = {cuuint64_t(o.k) * kElementBytes};
    const cuuint32_t box[2] = {kBlockK, cuuint32_t(box_rows)};
    return encode_map(o, o.a, 2, sizes, strides, box);
}

// Row 32 q + 8 t + 2 i + e of b, read in the order q, i, t, e (see kPermutedRows).
inline CUtensorMap make_b_map(const LinearParams& o, int box_rows) {
    const auto row_bytes = cuuint64_t(o.k) * kElementBytes;
    const cuuint64_t sizes[5] = {cuuint64_t(o.k), 2, 4, 4, cuuint64_t(o.n / kPermutedRows)};
    const cuuint64_t strides[4] = {row_bytes, 8 * row_bytes, 2 * row_bytes,
                                   kPermutedRows * row_bytes};
    const cuuint32_t box[5] = {kBlockK, 2, 4, 4, cuuint32_t(box_rows / kPermutedRows)};
    return encode_map(o, o.b, 5, sizes, strides, box);
}

template <typename C>
CUtensorMap make_residual_map(const LinearParams& o) {
    const cuuint64_t sizes[2] = {cuuint64_t(o.n), cuuint64_t(o.m)};
    const cuuint64_t strides[1] = {cuuint64_t(o.n) * kElementBytes};
    const cuuint32_t box[2] = {kResidualColumns, C::kTileM};
    return encode_map(o, o.residual, 2, sizes, strides, box);
}

inline ActivationConstants activation_constants(Activation activation) {
    constexpr float kLog2e = 1.4426950408889634f;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    switch (activation) {
        case Activation::relu:
            return {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        case Activation::gelu_tanh: {  // x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
            constexpr float kScale = 1.5957691216057308f * kLog2e;
            return {-kInfinity, kScale, 0.044715f * kScale, 1.0f, 0.0f, 0.0f};
        }
        case Activation::silu:
            return {-kInfinity, kLog2e, 0.0f, 1.0f, 0.0f, 0.0f};
        case Activation::tanh:  // 2 * sigmoid(2 * x) - 1
            return {-kInfinity, 2.0f * kLog2e, 0.0f, 0.0f, 2.0f, -1.0f};
        default:
            return {-kInfinity, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    }
}

// Weights of so many bytes stay in L2 while one row of tiles after the other reads all of them. Of
// larger ones a wave of CTAs along n reads nearly all again, from HBM: that takes power from the
// matrix unit, and with E4M3 more bytes than HBM delivers. In bands of so many rows a wave reads
// about as many rows of a as columns of b.
constexpr int64_t kMostBytesInL2 = 24 << 20;
constexpr int kRasterRows = 2048;

// Up to `most_rows` of a its tiles go along n, too.
template <typename C>
RasterOrder choose_raster(const Params& p, int most_rows) {
    const int64_t b_rows = int64_t{p.tiles_n} * C::kTileN;
    const bool fits_l2 = b_rows * p.num_k_blocks * kBlockK * kElementBytes <= kMostBytesInL2;
    if (fits_l2 || p.m <= most_rows) return {0, 1};
    return {0, std::max(1, kRasterRows / (C::kTileM * C::kClusterCtas))};
}

template <typename C>
Params make_params(const LinearParams& o) {
    const auto tiles = [](int64_t size, int tile) { return int((size + tile - 1) / tile); };
    Params p{};
    p.a = make_a_map(o, C::kTileM);
    p.b = make_b_map(o, C::kTileN / C::kClusterCtas);
    p.bias = o.bias;
    p.residual = o.residual;
    p.d = o.d;
    p.m = static_cast<int>(o.m);
    p.n = static_cast<int>(o.n);
    p.num_k_blocks = tiles(o.k, kBlockK);
    p.tiles_m = tiles(o.m, C::kTileM * C::kClusterCtas);
    p.tiles_n = tiles(o.n, C::kTileN);
    p.activation = activation_constants(o.activation);
    p.raster = choose_raster<C>(p, kRasterRows);  // one band of fewer rows loses 3 to 5 %
    return p;
}

// Clusters that fit the device at once: those of four and more CTAs leave some SMs unused.
template <typename C, typename Kernel>
int max_clusters(Kernel kernel, int smem_bytes) {
    if constexpr (C::kClusterCtas == 1) return num_sms();
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = C::kClusterCtas;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_sms() / C::kClusterCtas * C::kClusterCtas);
    config.blockDim = dim3(C::kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    BYTETX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
    return count;
}

constexpr int kSmemBytesOfTwo = 113 * 1024;  // of each of two CTAs of an SM
constexpr int kFewestStages = 3;             // that hide a trip to L2
// Measured in chains of BERT's layers on an H200, not in chains of one product: with more stages
// a text of 128 tokens takes 283 us instead of 276, with CTAs that share an SM one of 32 takes 243
// instead of 226.
constexpr int kMostBytesOfStages = 165 * 1024;
constexpr int kSmemBytesOfOne = 116 * 1024;  // at least, where an SM should hold one CTA

// Whether an SM should hold two CTAs: there are more than SMs. Clusters of three and more leave
// some of those unused, an H200's of four and eight 12 of 132.
inline bool are_crowded(int ctas, int ranks) {
    return ctas > (ranks > 2 ? num_sms() * 10 / 11 : num_sms());
}

// A smaller split-k than asked for where k has not as many blocks, or shared memory no room. A
// stage for every block of a CTA, up to kMostBytesOfStages: weights that have one are fetched
// before the kernel before has ended.
template <typename C, Epilogue kEpilogue, bool kGated>
void launch_small_m(const LinearParams& o, cudaStream_t stream) {
    using P = Parts<C, kEpilogue, kGated>;
    constexpr int kStage = sizeof(SmallMSmem<C>::stages), kHead = sizeof(SmallMSmem<C>) - kStage;
    const auto parts_bytes = [](int ranks) {
        return P::are_used(ranks) ? P::memory_bytes(ranks) : 0;
    };
    const int a_rows = static_cast<int>(std::min<int64_t>(C::kTileM, (o.m + 7) / 8 * 8));
    SmallMParams p{make_params<C>(o), 0, (a_rows + C::kTileN) * kBlockK * kElementBytes};
    p.a = make_a_map(o, a_rows);
    int ranks = std::clamp(o.split_k, 1, p.num_k_blocks);
    // Two stages at least: one is given back when the next one's products have begun.
    while (ranks > 1 && kHead + 2 * kStage + parts_bytes(ranks) > kMostSmemBytes) --ranks;
    const int ctas = p.tiles_m * p.tiles_n * ranks;
    const int wanted = std::min(C::kStages, (p.num_k_blocks + ranks - 1) / ranks);
    const auto stages_in = [&](int bytes) {
        return std::min(wanted, (bytes - kHead - parts_bytes(ranks)) / kStage);
    };
    p.num_stages = std::min(stages_in(kMostSmemBytes), std::max(2, kMostBytesOfStages / kStage));
    const bool is_crowded = are_crowded(ctas, ranks);
    if (is_crowded) {
        const int shallow = stages_in(kSmemBytesOfTwo);
        if (shallow >= std::min(wanted, kFewestStages)) p.num_stages = shallow;
    }
    const int smem_bytes = std::max(kHead + p.num_stages * kStage + parts_bytes(ranks),
                                    is_crowded ? 0 : kSmemBytesOfOne);
    constexpr auto kKernel = gemm_small_m_kernel<C, kEpilogue, kGated>;
    allow_smem_once<kKernel>(kMostSmemBytes);
    launch_kernel(kKernel, {dim3(ctas), dim3(C::Tile::kThreads), smem_bytes, stream, ranks}, p);
}

template <typename C, auto kKernel, int kSmemBytes, typename P>
void launch_persistent(const P& p, cudaStream_t stream) {
    static_assert(kSmemBytes <= kMostSmemBytes);
    allow_smem_once<kKernel>(kSmemBytes);
    static const int most = max_clusters<C>(kKernel, kSmemBytes);
    const int num_clusters = std::min(most, p.tiles_m * p.tiles_n);
    launch_kernel(kKernel,
                  {dim3(num_clusters * C::kClusterCtas), dim3(C::kThreads), kSmemBytes, stream,
                   C::kClusterCtas},
                  p);
}

template <typename C, Epilogue kEpilogue, bool kGated>
void launch(const LinearParams& o, cudaStream_t stream) {
    if constexpr (C::Tile::kIsForSmallM) {
        launch_small_m<C, kEpilogue, kGated>(o, stream);
    } else {
        const Params p = make_params<C>(o);
        launch_persistent<C, gemm_kernel<C, kEpilogue, kGated>, sizeof(Smem<C>)>(p, stream);
    }
}

template <typename T, typename Tile>
void launch_residual(const LinearParams& o, cudaStream_t stream) {
    using C = Config<T, WithResidual<Tile>>;
    const ResidualParams p{make_params<C>(o), make_residual_map<C>(o)};
    launch_persistent<C, gemm_residual_kernel<C>, sizeof(ResidualSmem<C>)>(p, stream);
}

template <typename T, typename Tile>
void launch_epilogue(const LinearParams& o, cudaStream_t stream) {
    using C = Config<T, Tile>;
    // Wider tiles spill where they gate in bf16.
    constexpr bool kCanGate = C::kTileN % (2 * kPermutedRows) == 0 && C::kTileN <= 128;
    const bool is_erf = o.activation == Activation::gelu;
    if (o.gated) {
        if constexpr (kCanGate) {
            if (is_erf) return launch<C, Epilogue::erf, true>(o, stream);
            return launch<C, Epilogue::sigmoid, true>(o, stream);
        }
        throw std::invalid_argument("linear: only tilings of 64 or 128 columns gate");
    }
    if (is_erf) return launch<C, Epilogue::erf, false>(o, stream);
    if constexpr (!Tile::kIsForSmallM) {
        if (o.residual != nullptr) return launch_residual<T, Tile>(o, stream);
    }
    if (o.activation == Activation::none || o.activation == Activation::relu) {
        return launch<C, Epilogue::linear, false>(o, stream);
    }
    launch<C, Epilogue::sigmoid, false>(o, stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_tiling(const LinearParams& o, cudaStream_t stream) {
    if (o.dtype == DType::f16) return launch_epilogue<cutlass::half_t, Tile>(o, stream);
    launch_epilogue<cutlass::bfloat16_t, Tile>(o, stream);
}

}  // namespace bytetx::gemm
