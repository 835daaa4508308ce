// Launches of the prefill kernel of paged attention; paged_attention.cu says what it computes.
#include <algorithm>

#include "cache_ops.h"
#include "common/dispatch.cuh"
#include "cuda/paged_prefill.cuh"

namespace bytetx::paged {
namespace {

template <typename T, int kHeadDim>
void launch_typed(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    using C = PrefillTypes<T, kHeadDim, PrefillTiling<kHeadDim>>;
    const PlanSizes sizes = plan_sizes(p.plan);
    const PlanView view = view_plan(p.plan.plan, sizes);
    PrefillParams params{};
    params.scale = p.softmax_scale * kLog2e;
    params.change = score_change(p);
    params.q = p.q;
    params.k_cache = p.k_cache;
    params.v_cache = p.v_cache;
    params.out = p.out;
    params.page_table = p.page_table;
    params.header = view.header;
    params.tiles = view.tiles;
    params.max_pages = p.max_pages;
    params.q_stride = p.q_stride;
    while (1 << params.page_shift < p.page_size) ++params.page_shift;
    params.num_heads = p.plan.num_heads;
    params.num_kv_heads = p.plan.num_kv_heads;
    params.group = p.plan.num_heads / p.plan.num_kv_heads;
    params.group_inverse = (65536u + params.group - 1) / params.group;
    params.head_dim = p.head_dim;
    params.window = p.plan.window;
    params.halves_last = !p.plan.batch_invariant;
    const auto kernel = prefill_kernel<C>;
    constexpr int kSmemBytes = sizeof(PrefillSmem<C>);
    allow_smem(kernel, kSmemBytes);
    const int64_t most = sizes.tiles * p.plan.num_kv_heads;
    const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(most, num_sms())),
                            128 * (kPrefillWarpgroups + 1), kSmemBytes, stream};
    launch_kernel(kernel, shape, params);
}

}  // namespace

void launch_prefill(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    dispatch_at_least<64, 96, 128>(p.head_dim, [&]<int kHeadDim>() {
        if (p.dtype == DType::f16) return launch_typed<cutlass::half_t, kHeadDim>(p, stream);
        launch_typed<cutlass::bfloat16_t, kHeadDim>(p, stream);
    });
}

}  // namespace bytetx::paged

namespace bytetx {

int32_t paged_tile_tokens(int32_t num_heads, int32_t num_kv_heads) {
    return paged::kPrefillRows / (num_heads / num_kv_heads);
}

}  // namespace bytetx
