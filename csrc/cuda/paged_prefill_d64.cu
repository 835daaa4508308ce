#include "cuda/paged_prefill.cuh"

namespace bytetx::paged {

template <>
void launch_prefill<64>(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    launch_prefill_of_any_type<64>(p, stream);
}

}  // namespace bytetx::paged
