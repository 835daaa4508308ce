// gemm_all_reduce() for small m: which instance of the kernel runs, and its launch.
#pragma once

#include "comm/comm_tilings.cuh"
#include "comm/one_shot_epilogue.cuh"
#include "comm/sum_rows.cuh"
#include "gemm/launch.cuh"

namespace bytetx::gemm {

template <typename C>
void launch_one_shot_kernel(const GemmSumParams& o, cudaStream_t stream) {
    using K = Kernel<C, OneShotScheduler, OneShotProducer<C>, OneShotEpilogue<C>>;
    constexpr int kSmemBytes = sizeof(typename K::Smem);
    static_assert(kSmemBytes <= kMostSmemBytes);
    const LinearParams& l = o.linear;
    typename K::Params p{};
    p.a = make_map(matrix(l, l.a, l.m, l.k), C::kTileN);
    p.b = make_map(matrix(l, l.b, l.n, l.k), C::kTileM);
    p.m = static_cast<int>(l.m);
    p.n = static_cast<int>(l.n);
    p.num_k_blocks = num_tiles(l.k, kBlockK);
    p.tiles_m = num_tiles(l.m, C::kTileN);
    p.tiles_n = num_tiles(l.n, C::kTileM);
    p.epilogue = {l.residual, comm::make_peers(o.peers),
                  o.is_two_shot ? static_cast<int>(comm::rows_of_owner(l.m, o.peers.size)) : 0};
    const int split_k = std::min(std::max(l.split_k, 1), p.num_k_blocks);
    allow_smem_once<K::kFunction>(kSmemBytes);
    launch_kernel(
        K::kFunction,
        {dim3(p.tiles_m * p.tiles_n * split_k), dim3(C::kThreads), kSmemBytes, stream, split_k}, p);
    if (o.is_two_shot) return comm::launch_two_shot(o, nullptr, stream);
    comm::launch_sum_staging(o, nullptr, stream);
}

template <typename Tile>
void launch_one_shot(const GemmSumParams& o, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) {
        return launch_one_shot_kernel<Config<Half, Tile>>(o, stream);
    }
    launch_one_shot_kernel<Config<BFloat16, Tile>>(o, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_one_shot<OneShot16x64>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot16x128>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot32x64>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot32x128>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot64x64>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot64x128>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot128x128>(const GemmSumParams& p, cudaStream_t stream);
extern template void launch_one_shot<OneShot256x64>(const GemmSumParams& p, cudaStream_t stream);

}  // namespace bytetx::gemm
