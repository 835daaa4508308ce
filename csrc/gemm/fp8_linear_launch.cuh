// fp8_linear(): which instance of the kernel runs, and its launch. CTAs never share k: a row's sums
// are taken in one order, whatever m is.
#pragma once

#include "gemm/fp8_epilogue.cuh"
#include "gemm/launchers.h"
#include "gemm/small_m_launch.cuh"

namespace bytetx::gemm {

// Two E4M3 are one element.
inline Matrix pairs(const Fp8LinearParams& o, const void* data, int64_t rows) {
    return {"fp8_linear", CU_TENSOR_MAP_DATA_TYPE_UINT16, data, rows, o.k / 2};
}

template <typename K>
typename K::Params fp8_problem(const Fp8LinearParams& o) {
    typename K::Params p{};
    static_cast<Problem&>(p) =
        make_problem<typename K::C>(pairs(o, o.a, o.m), pairs(o, o.b, o.n), o.d);
    p.epilogue = {o.a_scale, o.b_scale, o.bias, 1.0f / o.d_scale,
                  activation_constants(o.activation)};
    return p;
}

template <typename C, ActivationForm kForm, typename Out, bool kGated = false>
void launch_fp8(const Fp8LinearParams& o, cudaStream_t stream) {
    using Epilogue = Fp8Epilogue<C, kForm, Out, kGated>;
    if constexpr (C::kIsForSmallM) {
        using K = Kernel<C, SplitKScheduler, DenseProducer<C>, Epilogue>;
        auto p = fp8_problem<K>(o);
        launch_one_tile<K>(p, pairs(o, o.a, o.m), 1, true, 0, stream);
    } else {
        using K = Kernel<C, RasterScheduler, DenseProducer<C>, Epilogue>;
        auto p = fp8_problem<K>(o);
        p.scheduler = choose_raster<C>(p, 0);
        launch_persistent<K>(p, stream);
    }
}

template <typename C, typename Out>
void launch_fp8_epilogue(const Fp8LinearParams& o, cudaStream_t stream) {
    if (o.activation == Activation::gelu) return launch_fp8<C, ActivationForm::erf, Out>(o, stream);
    if (o.activation == Activation::none || o.activation == Activation::relu) {
        return launch_fp8<C, ActivationForm::linear, Out>(o, stream);
    }
    launch_fp8<C, ActivationForm::sigmoid, Out>(o, stream);
}

template <typename C, typename Out>
void launch_fp8_gated(const Fp8LinearParams& o, cudaStream_t stream) {
    if (o.activation == Activation::gelu) {
        return launch_fp8<C, ActivationForm::erf, Out, true>(o, stream);
    }
    launch_fp8<C, ActivationForm::sigmoid, Out, true>(o, stream);
}

template <typename Tile>
void launch_fp8_linear(const Fp8LinearParams& o, cudaStream_t stream) {
    using C = Config<E4m3, Tile>;
    if (o.gated) {
        if (o.dtype == DType::f16) return launch_fp8_gated<C, Half>(o, stream);
        return launch_fp8_gated<C, BFloat16>(o, stream);
    }
    if (o.is_d_fp8) return launch_fp8_epilogue<C, E4m3>(o, stream);
    if (o.dtype == DType::f16) return launch_fp8_epilogue<C, Half>(o, stream);
    launch_fp8_epilogue<C, BFloat16>(o, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_fp8_linear<SmallM64x64>(const Fp8LinearParams& p, cudaStream_t stream);

extern template void launch_fp8_linear<SmallM128x64>(const Fp8LinearParams& p, cudaStream_t stream);

extern template void launch_fp8_linear<Fp8Tile64x128>(const Fp8LinearParams& p,
                                                      cudaStream_t stream);

extern template void launch_fp8_linear<Fp8Tile128x128>(const Fp8LinearParams& p,
                                                       cudaStream_t stream);

}  // namespace bytetx::gemm
