// The launches of packed attention in a tree of sequences, as attention_launch.cuh's.
#pragma once

#include "cuda/attention_launch.cuh"

namespace bytetx::attention {

// A plan of a tree, whose tiles are made for the kernel.
template <typename T, int kHeadDim>
void launch_tree_typed(const PlannedAttentionParams& p, cudaStream_t stream) {
    const auto num_tiles = static_cast<int>(p.num_tiles);
    if constexpr (kHeadDim <= kMaxSharedDim) {
        if (p.tile_rows == pipeline_rows(kHeadDim)) {
            return launch_pipeline<T, kHeadDim, true>(p, num_tiles, stream);
        }
    }
    launch_tiles<T, kHeadDim, false, true>(p, num_tiles, stream);
}

template <int kHeadDim>
void launch_tree_attention(const PlannedAttentionParams& p, cudaStream_t stream) {
    if (p.dtype == DType::f16) return launch_tree_typed<Half, kHeadDim>(p, stream);
    launch_tree_typed<BFloat16, kHeadDim>(p, stream);
}

// Units of the build, as attention_launch.cuh's.
extern template void launch_tree_attention<32>(const PlannedAttentionParams& p,
                                               cudaStream_t stream);

extern template void launch_tree_attention<64>(const PlannedAttentionParams& p,
                                               cudaStream_t stream);

extern template void launch_tree_attention<96>(const PlannedAttentionParams& p,
                                               cudaStream_t stream);

extern template void launch_tree_attention<128>(const PlannedAttentionParams& p,
                                                cudaStream_t stream);

extern template void launch_tree_attention<256>(const PlannedAttentionParams& p,
                                                cudaStream_t stream);

}  // namespace bytetx::attention
