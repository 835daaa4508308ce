// split_norm()'s product: which instance of the kernel runs, and its launch.
#pragma once

#include "gemm/parts.cuh"
#include "gemm/small_m_launch.cuh"
#include "split_norm_ops.h"

namespace bytetx::gemm {

template <typename C>
void launch_parts_of(const SplitNormParams& o, int num_parts, cudaStream_t stream) {
    using K = Kernel<C, PartScheduler, DenseProducer<C>, PartEpilogue<C>>;
    const auto matrix = [&](const void* data, int64_t rows) {
        return Matrix{"split_norm", map_type(o.dtype), data, rows, o.k};
    };
    typename K::Params p{};
    static_cast<Problem&>(p) = make_problem<C>(matrix(o.a, o.m), matrix(o.b, o.n), nullptr);
    p.scheduler = {num_parts};
    p.epilogue = {o.parts};
    launch_one_tile<K>(p, matrix(o.a, o.m), num_parts, false, 0, stream);
}

template <typename Tile>
void launch_parts(const SplitNormParams& o, int num_parts, cudaStream_t stream) {
    if (o.dtype == DType::f16) return launch_parts_of<Config<Half, Tile>>(o, num_parts, stream);
    launch_parts_of<Config<BFloat16, Tile>>(o, num_parts, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_parts<SmallM64x32>(const SplitNormParams& o, int num_parts,
                                               cudaStream_t stream);
extern template void launch_parts<SmallM64x64>(const SplitNormParams& o, int num_parts,
                                               cudaStream_t stream);
extern template void launch_parts<SmallM64x96>(const SplitNormParams& o, int num_parts,
                                               cudaStream_t stream);
extern template void launch_parts<SmallM128x32>(const SplitNormParams& o, int num_parts,
                                                cudaStream_t stream);

extern template void launch_parts<SmallM128x64>(const SplitNormParams& o, int num_parts,
                                                cudaStream_t stream);
extern template void launch_parts<SmallM128x96>(const SplitNormParams& o, int num_parts,
                                                cudaStream_t stream);
extern template void launch_parts<SmallM128x128>(const SplitNormParams& o, int num_parts,
                                                 cudaStream_t stream);

}  // namespace bytetx::gemm
