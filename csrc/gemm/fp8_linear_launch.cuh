// fp8_linear(): which instance of the kernel runs, and its launch.
#pragma once

#include "gemm/fp8_epilogue.cuh"
#include "gemm/launch.cuh"
#include "gemm/launchers.h"

namespace bytetx::gemm {

template <typename C, ActivationForm kForm, typename Out>
void launch_fp8(const Fp8LinearParams& o, cudaStream_t stream) {
    using K = Kernel<C, RasterScheduler, DenseProducer<C>, Fp8Epilogue<C, kForm, Out>>;
    const auto pairs = [&](const void* data, int64_t rows) {  // two E4M3 are one element
        return Matrix{"fp8_linear", CU_TENSOR_MAP_DATA_TYPE_UINT16, data, rows, o.k / 2};
    };
    typename K::Params p{};
    static_cast<Problem&>(p) = make_problem<C>(pairs(o.a, o.m), pairs(o.b, o.n), o.d);
    p.scheduler = choose_raster<C>(p, 0);
    p.epilogue = {o.a_scale, o.b_scale, o.bias, 1.0f / o.d_scale,
                  activation_constants(o.activation)};
    launch_persistent<K>(p, stream);
}

template <typename C, typename Out>
void launch_fp8_epilogue(const Fp8LinearParams& o, cudaStream_t stream) {
    if (o.activation == Activation::gelu) return launch_fp8<C, ActivationForm::erf, Out>(o, stream);
    if (o.activation == Activation::none || o.activation == Activation::relu) {
        return launch_fp8<C, ActivationForm::linear, Out>(o, stream);
    }
    launch_fp8<C, ActivationForm::sigmoid, Out>(o, stream);
}

template <typename Tile>
void launch_fp8_linear(const Fp8LinearParams& o, cudaStream_t stream) {
    using C = Config<E4m3, Tile>;
    if (o.is_d_fp8) return launch_fp8_epilogue<C, E4m3>(o, stream);
    if (o.dtype == DType::f16) return launch_fp8_epilogue<C, Half>(o, stream);
    launch_fp8_epilogue<C, BFloat16>(o, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_fp8_linear<Fp8Tile64x64>(const Fp8LinearParams& p, cudaStream_t stream);

extern template void launch_fp8_linear<Fp8Tile64x128>(const Fp8LinearParams& p,
                                                      cudaStream_t stream);

extern template void launch_fp8_linear<Fp8Tile128x128>(const Fp8LinearParams& p,
                                                       cudaStream_t stream);

}  // namespace bytetx::gemm
