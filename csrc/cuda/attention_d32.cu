// Attention kernels of tiles 32 features wide; attention.cu says what they do.
#include "cuda/attention_launch.cuh"

namespace bytetx::attention {

template <>
void launch_attention<32>(const PlannedAttentionParams& p, cudaStream_t stream) {
    launch_any_type<32>(p, stream);
}

}  // namespace bytetx::attention
