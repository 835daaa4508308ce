// Launches of paged prefill: attention of pieces of several tokens (paged_source.cuh).
// One head size a unit, so that they compile at once.
#pragma once

#include <algorithm>

#include "cache_ops.h"
#include "common/launch.cuh"
#include "cuda/attention_maps.cuh"
#include "cuda/paged_source.cuh"

namespace bytetx::paged {

// As packed attention's pipeline (attention_launch.cuh). With soft caps and biases steps of 64
// keys, for scores of ALiBi grow by the step, and weights must not exceed 2^127.
template <int kHeadDim, bool kChanges>
struct PrefillTiling {
    static constexpr bool kIsWide = kHeadDim > 64;
    static constexpr int kBlockN = kChanges ? 64 : 128;
    static constexpr int kStages = (kHeadDim > 96 ? 3 : kIsWide ? 4 : 6) * (kChanges ? 2 : 1);
    static constexpr int kNumWarpgroups = prefill_warpgroups(kHeadDim);
    static constexpr int kQStages = 1;
    static constexpr int kConsumerRegisters = kIsWide ? 232 : kChanges ? 152 : 160;
    static constexpr bool kChangesScores = kChanges;
    static constexpr bool kQInRegisters = !kIsWide;
    static constexpr bool kGroupsKeys = true;
    static constexpr bool kHasTree = false;
};

// Queries: boxes of the tokens of a warpgroup, with all heads of a group.
template <typename C>
CUtensorMap make_q_map(const PlannedPagedAttentionParams& p, const PrefillParams& params) {
    const cuuint64_t sizes[3] = {cuuint64_t(p.plan.head_dim), cuuint64_t(params.num_heads),
                                 cuuint64_t(p.plan.total_tokens)};
    const cuuint64_t strides[2] = {cuuint64_t(p.plan.head_dim) * kElementBytes,
                                   cuuint64_t(p.q_stride) * kElementBytes};
    const cuuint32_t box[3] = {C::kBoxColumns, cuuint32_t(params.group),
                               cuuint32_t(kTileRows / params.group)};
    return attention::encode_map<C>(p.dtype, p.q, sizes, strides, box);
}

// Keys or values: boxes of box_keys keys of one head.
template <typename C>
CUtensorMap make_cache_map(const PlannedPagedAttentionParams& p, const PrefillParams& params,
                           const void* cache) {
    constexpr cuuint64_t kColumns = C::kBoxColumns, kGroupKeys = 8;
    constexpr cuuint64_t kMostGroups = cuuint64_t{1} << 28;  // slots are 31 bits
    const cuuint64_t row = cuuint64_t(params.num_kv_heads) * p.plan.head_dim;
    const cuuint64_t sizes[4] = {kColumns, kGroupKeys, row / kColumns, kMostGroups};
    const cuuint64_t strides[3] = {row * kElementBytes, kColumns * kElementBytes,
                                   kGroupKeys * row * kElementBytes};
    const cuuint32_t box[4] = {cuuint32_t(kColumns), cuuint32_t(kGroupKeys),
                               C::kDim / C::kBoxColumns, cuuint32_t(params.box_keys / kGroupKeys)};
    return attention::encode_map<C>(p.dtype, cache, sizes, strides, box);
}

inline PrefillParams prefill_params(const PlannedPagedAttentionParams& p) {
    const PlanView view = view_plan(p.plan.plan, plan_sizes(p.plan));
    PrefillParams params{};
    params.q_rows = p.q;
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
    params.head_dim = p.plan.head_dim;
    params.window = p.plan.window;
    params.beside_rows = runs_side_by_side(p.plan);
    params.halves_last = !p.plan.batch_invariant;
    params.softmax_scale = p.softmax_scale;
    params.power_scale = p.softmax_scale * kLog2e;
    params.change = score_change(p);
    return params;
}

template <typename C, template <typename> typename Source>
void launch_source(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    constexpr auto kKernel = attention::pipeline_kernel<C, Source<C>>;
    constexpr int kSmemBytes = sizeof(attention::PipelineSmem<C, Source<C>>);
    allow_smem_once<kKernel>(kSmemBytes);
    PrefillParams params = prefill_params(p);
    params.q = make_q_map<C>(p, params);
    if constexpr (!Source<C>::kThreadsCopy) {
        params.box_keys = std::min(p.page_size, C::kBlockN);
        params.k = make_cache_map<C>(p, params, p.k_cache);
        params.v = make_cache_map<C>(p, params, p.v_cache);
    }
    const int64_t most = plan_sizes(p.plan).tiles * p.plan.num_kv_heads;
    const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(most, num_sms())),
                            128 * (C::kNumWarpgroups + 1), kSmemBytes, stream};
    launch_kernel(kKernel, shape, params);
}

template <typename T, int kHeadDim>
void launch_prefill_typed(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    using Plain = attention::TileTypes<T, kHeadDim, PrefillTiling<kHeadDim, false>>;
    using Changing = attention::TileTypes<T, kHeadDim, PrefillTiling<kHeadDim, true>>;
    constexpr int kLeastPage = 8;
    if (p.plan.head_dim != kHeadDim || p.page_size < kLeastPage) {
        return launch_source<Changing, PagedCopySource>(p, stream);
    }
    if (p.softcap > 0.0f || p.alibi_slopes != nullptr) {
        return launch_source<Changing, PagedSource>(p, stream);
    }
    launch_source<Plain, PagedSource>(p, stream);
}

template <int kHeadDim>
void launch_prefill(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    if (p.dtype == DType::f16) return launch_prefill_typed<Half, kHeadDim>(p, stream);
    launch_prefill_typed<BFloat16, kHeadDim>(p, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_prefill<64>(const PlannedPagedAttentionParams& p, cudaStream_t stream);

extern template void launch_prefill<96>(const PlannedPagedAttentionParams& p, cudaStream_t stream);

extern template void launch_prefill<128>(const PlannedPagedAttentionParams& p, cudaStream_t stream);

}  // namespace bytetx::paged
