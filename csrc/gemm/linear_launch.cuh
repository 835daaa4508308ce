// linear(): which instance of the kernel runs, and its launch.
#pragma once

#include "gemm/launch.cuh"
#include "gemm/launchers.h"
#include "gemm/linear_epilogue.cuh"
#include "gemm/residual_epilogue.cuh"
#include "gemm/split_k_epilogue.cuh"

namespace bytetx::gemm {

constexpr int kSmemBytesOfTwo = 113 * 1024;  // each of two CTAs of an SM has so much
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

struct SmallMShape {
    int num_stages, smem_bytes;
};

// A stage for every block of a CTA, up to kMostBytesOfStages: weights that have one are fetched
// before the kernel before has ended. more_bytes: what a CTA has behind the stages.
template <typename C>
SmallMShape small_m_shape(int ctas, int cluster_ctas, int blocks, int more_bytes) {
    constexpr int kStage = C::kStageBytes, kHead = LaunchStages<C>::kHeadBytes;
    const int wanted = std::min(C::kStages, blocks);
    const auto stages_in = [&](int bytes) {
        return std::min(wanted, (bytes - kHead - more_bytes) / kStage);
    };
    int num_stages = std::min(stages_in(kMostSmemBytes), std::max(2, kMostBytesOfStages / kStage));
    const bool is_crowded = are_crowded(ctas, cluster_ctas);
    if (is_crowded) {
        const int shallow = stages_in(kSmemBytesOfTwo);
        if (shallow >= std::min(wanted, kFewestStages)) num_stages = shallow;
    }
    const int used = kHead + num_stages * kStage + more_bytes;
    return {num_stages, std::max(used, is_crowded ? 0 : kSmemBytesOfOne)};
}

// A smaller split-k than asked for where k has not as many blocks, or shared memory no room.
template <typename C, ActivationForm kForm, bool kGated>
void launch_small_m(const LinearParams& o, cudaStream_t stream) {
    using Epilogue = SplitKEpilogue<C, kForm, kGated>;
    using K = Kernel<C, SplitKScheduler, DenseProducer<C>, Epilogue>;
    constexpr int kStage = C::kStageBytes, kHead = LaunchStages<C>::kHeadBytes;
    static_assert(sizeof(typename K::Smem) <= kHead);
    const auto parts_bytes = [](int ranks) { return Epilogue::memory_bytes(ranks); };
    const int a_rows = static_cast<int>(std::min<int64_t>(C::kTileM, (o.m + 7) / 8 * 8));
    typename K::Params p{};
    static_cast<Problem&>(p) = make_problem<C>(o);
    p.a = make_map(matrix(o, o.a, o.m, o.k), a_rows);
    p.epilogue = LinearInputs::of(o);
    int ranks = std::clamp(o.split_k, 1, p.num_k_blocks);
    // Two stages at least: one is given back when the next one's products have begun.
    while (ranks > 1 && kHead + 2 * kStage + parts_bytes(ranks) > kMostSmemBytes) --ranks;
    const int ctas = p.tiles_m * p.tiles_n * ranks;
    const int blocks = num_tiles(p.num_k_blocks, ranks);  // most k blocks of one CTA
    const auto shape = small_m_shape<C>(ctas, ranks, blocks, parts_bytes(ranks));
    p.stages = {shape.num_stages, (a_rows + C::kTileN) * kBlockK * kElementBytes};
    allow_smem_once<K::kFunction>(kMostSmemBytes);
    launch_kernel(K::kFunction, {dim3(ctas), dim3(C::kThreads), shape.smem_bytes, stream, ranks},
                  p);
}

// Clusters that share columns instead of k.
template <typename C, ActivationForm kForm, bool kGated>
void launch_small_m_pairs(const LinearParams& o, cudaStream_t stream) {
    using Epilogue = ResidualFirstEpilogue<C, kForm, kGated>;
    using K = Kernel<C, OneTileScheduler, DenseProducer<C>, Epilogue>;
    static_assert(sizeof(typename K::Smem) <= LaunchStages<C>::kHeadBytes);
    typename K::Params p{};
    static_cast<Problem&>(p) = make_problem<C>(o);
    p.epilogue = LinearInputs::of(o);
    const int ctas = p.tiles_m * p.tiles_n * C::kClusterCtas;
    const auto shape = small_m_shape<C>(ctas, C::kClusterCtas, p.num_k_blocks, 0);
    p.stages = {shape.num_stages, C::kStageBytes};
    allow_smem_once<K::kFunction>(kMostSmemBytes);
    launch_kernel(K::kFunction,
                  {dim3(ctas), dim3(C::kThreads), shape.smem_bytes, stream, C::kClusterCtas}, p);
}

template <typename C, ActivationForm kForm, bool kGated>
void launch(const LinearParams& o, cudaStream_t stream) {
    if constexpr (C::kIsForSmallM && C::kClusterCtas > 1) {
        launch_small_m_pairs<C, kForm, kGated>(o, stream);
    } else if constexpr (C::kIsForSmallM) {
        launch_small_m<C, kForm, kGated>(o, stream);
    } else {
        using K = Kernel<C, RasterScheduler, DenseProducer<C>, LinearEpilogue<C, kForm, kGated>>;
        typename K::Params p{};
        static_cast<Problem&>(p) = make_problem<C>(o);
        p.scheduler = choose_raster<C>(p, kRasterRows);  // one band of fewer rows loses 3 to 5 %
        p.epilogue = LinearInputs::of(o);
        launch_persistent<K>(p, stream);
    }
}

template <typename T, typename Tile>
void launch_residual(const LinearParams& o, cudaStream_t stream) {
    using C = Config<T, WithTileInput<Tile, kBoxColumns>>;
    using Epilogue = ResidualEpilogue<C>;
    using K = Kernel<C, RasterScheduler, PrefetchingProducer<C, Epilogue>, Epilogue>;
    typename K::Params p{};
    static_cast<Problem&>(p) = make_problem<C>(o);
    p.scheduler = choose_raster<C>(p, kRasterRows);
    static_cast<LinearInputs&>(p.epilogue) = LinearInputs::of(o);
    p.epilogue.residual_map = make_map(matrix(o, o.residual, o.m, o.n), C::kTileM);
    launch_persistent<K>(p, stream);
}

template <typename T, typename Tile>
void launch_epilogue(const LinearParams& o, cudaStream_t stream) {
    using C = Config<T, Tile>;
    constexpr bool kCanGate = C::kTileN % (2 * kPermutedRows) == 0;
    const bool is_erf = o.activation == Activation::gelu;
    if (o.gated) {
        if constexpr (kCanGate) {
            if (is_erf) return launch<C, ActivationForm::erf, true>(o, stream);
            return launch<C, ActivationForm::sigmoid, true>(o, stream);
        }
        throw std::invalid_argument("linear: only tilings of a multiple of 64 columns gate");
    }
    if (is_erf) return launch<C, ActivationForm::erf, false>(o, stream);
    if constexpr (!Tile::kIsForSmallM) {
        if (o.residual != nullptr) return launch_residual<T, Tile>(o, stream);
    }
    if (o.activation == Activation::none || o.activation == Activation::relu) {
        return launch<C, ActivationForm::linear, false>(o, stream);
    }
    launch<C, ActivationForm::sigmoid, false>(o, stream);
}

template <typename Tile>
void launch_linear(const LinearParams& o, cudaStream_t stream) {
    if (o.dtype == DType::f16) return launch_epilogue<Half, Tile>(o, stream);
    launch_epilogue<BFloat16, Tile>(o, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_linear<Tile128x128>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<Tile128x192>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<Tile192x128>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<Tile192x128Single>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM64x32>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM64x64>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM64x96>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM128x32>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM128x64>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM128x96>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM128x128>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM192x128>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM64x64Pair>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM128x64Pair>(const LinearParams& p, cudaStream_t stream);

extern template void launch_linear<SmallM128x128Pair>(const LinearParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
