// linear(): which instance of the kernel runs, and its launch.
#pragma once

#include "gemm/launch.cuh"
#include "gemm/launchers.h"
#include "gemm/linear_epilogue.cuh"
#include "gemm/residual_epilogue.cuh"
#include "gemm/small_m_launch.cuh"
#include "gemm/split_k_epilogue.cuh"

namespace bytetx::gemm {

// A smaller split-k than asked for where k has not as many blocks, or shared memory no room.
template <typename C, ActivationForm kForm, bool kGated>
void launch_small_m(const LinearParams& o, cudaStream_t stream) {
    using Epilogue = SplitKEpilogue<C, kForm, kGated>;
    using K = Kernel<C, SplitKScheduler, DenseProducer<C>, Epilogue>;
    constexpr int kStage = C::kStageBytes, kHead = LaunchStages<C>::kHeadBytes;
    const auto parts_bytes = [](int ranks) { return Epilogue::memory_bytes(ranks); };
    typename K::Params p{};
    static_cast<Problem&>(p) = make_problem<C>(o);
    p.epilogue = LinearInputs::of(o);
    int ranks = std::clamp(o.split_k, 1, p.num_k_blocks);
    // Two stages at least: one is given back when the next one's products have begun.
    while (ranks > 1 && kHead + 2 * kStage + parts_bytes(ranks) > kMostSmemBytes) --ranks;
    launch_one_tile<K>(p, matrix(o, o.a, o.m, o.k), ranks, true, parts_bytes(ranks), stream);
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
