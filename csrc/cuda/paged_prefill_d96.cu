#include "cuda/paged_prefill.cuh"

namespace bytetx::paged {

template <>
void launch_prefill<96>(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    launch_prefill_of_any_type<96>(p, stream);
}

}  // namespace bytetx::paged
