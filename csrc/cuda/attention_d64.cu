// Attention kernels of tiles 64 features wide; attention.cu says what they do.
#include "cuda/attention_launch.cuh"

namespace bytetx::attention {

template <>
void launch_attention<64>(const PlannedAttentionParams& p, cudaStream_t stream) {
    launch_any_type<64>(p, stream);
}

}  // namespace bytetx::attention
