// Shared by the kernels that sum rows over ranks: see sum_rows.cu and sum_staging.cu.
#pragma once

#include <stdexcept>
#include <string>

#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "common/check.cuh"
#include "common/row_norm.cuh"

namespace bytetx::comm {

struct SumParams {
    NormParams norm;
    const void* bias;
    Peers peers;
    SumShape shape;
};

template <typename T, typename Tiling>
__device__ __forceinline__ void add_row(RowRegisters<T, Tiling>& h, const RawRow<Tiling>& row) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] += element<T>(row.words[i], j);
    }
}

// Parameter: RowParameter, or a class with its get().
template <typename T, typename Tiling, typename Parameter>
__device__ __forceinline__ void add_parameter(RowRegisters<T, Tiling>& h, const Parameter& values,
                                              int lane, int num_vecs) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        const uint4 words = values.get(i, v);
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] += element<T>(words, j);
    }
}

template <typename T, typename Tiling>
__device__ __forceinline__ void clear_row(RowRegisters<T, Tiling>& h) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] = 0.0f;
    }
}

// Whether this CTA ends the call (true in one of its threads): it is the last whose threads have
// all read the call's epoch. The next kernel knows from the end of this one that the rows were
// read.
__device__ __forceinline__ bool is_last_to_start(const SumParams& p) {
    __syncthreads();
    return threadIdx.x == 0 && atomicAdd(p.peers.epochs + kSumTicket, 1) == gridDim.x - 1;
}

__device__ __forceinline__ void end_sum(const SumParams& p, uint32_t epoch) {
    p.peers.epochs[kSumTicket] = 0;
    p.peers.epochs[kSumTiles] = static_cast<uint32_t>(p.shape.num_tiles);
    p.peers.epochs[kSumEpoch] = epoch;
}

// launch.operator()<T, Tiling, kNorm>() for the sum's dtype, row and norm.
template <typename T, RowNorm kNorm, typename F>
void dispatch_row(int64_t hidden_size, const F& launch) {
    const bool has_tiling = dispatch_row_tiling<T>(
        hidden_size, [&]<typename Tiling>() { launch.template operator()<T, Tiling, kNorm>(); });
    if (!has_tiling) {
        throw std::invalid_argument("a sum over ranks takes rows of at most 16384 features, got " +
                                    std::to_string(hidden_size));
    }
}

template <typename F>
void dispatch_sum(const GemmSumParams& o, const F& launch) {
    const int64_t size = o.norm.hidden_size;
    const auto with_norm = [&]<typename T>() {
        if (o.is_rms) return dispatch_row<T, RowNorm::rms>(size, launch);
        dispatch_row<T, RowNorm::layer>(size, launch);
    };
    if (o.linear.dtype == DType::f16) return with_norm.template operator()<__half>();
    with_norm.template operator()<__nv_bfloat16>();
}

}  // namespace bytetx::comm
