// Attention kernels of tiles 256 features wide; attention.cu says what they do.
#include "cuda/attention_launch.cuh"

namespace bytetx::attention {

template <>
void launch_attention<256>(const PlannedAttentionParams& p, cudaStream_t stream) {
    launch_any_type<256>(p, stream);
}

}  // namespace bytetx::attention
