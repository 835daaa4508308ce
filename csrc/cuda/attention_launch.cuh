// From the params of ops.h to a launch: TMA maps, tilings, the choice between the kernels.
// One head size a unit, so that they compile at once.
#pragma once

#include "common/launch.cuh"
#include "common/tensor_map.cuh"
#include "cuda/attention_kernels.cuh"
#include "cuda/attention_maps.cuh"
#include "cuda/attention_packed.cuh"
#include "cuda/attention_plan.cuh"
#include "cuda/attention_split.cuh"
#include "ops.h"

namespace bytetx::attention {

// tile_kernel: two stages of keys where 4 or 5 CTAs still fit the registers of an SM, else one:
// more CTAs hide more than deeper rings do (H200, 128 features, mean 20: 155 against 176 us). Tiles
// of 256 features leave room for two.
template <int kHeadDim, bool kChanges, bool kTree = false>
struct TileTiling {
    static constexpr bool kHasTree = kTree;
    static constexpr int kBlockN = 64;
    static constexpr int kStages = kHeadDim <= 64 ? 2 : 1;
    static constexpr int kNumWarpgroups = 1;
    static constexpr int kQStages = 1;
    static constexpr int kConsumerRegisters = 0;
    static constexpr bool kChangesScores = kChanges;
    static constexpr bool kQInRegisters = false;
    static constexpr bool kGroupsKeys = false;
    static constexpr int kMinCtas = kHeadDim > 128 ? 2
                                                   : (kHeadDim <= 64 ? 5 : 3) -
                                                         ((kChanges || kTree) && kHeadDim <= 64);
};

// pipeline_kernel: as many registers of consumers as a CTA of a whole SM has, and as many stages as
// its shared memory holds. Up to 64 features three warpgroups of 160 registers with queries in
// registers (4096 tokens, 64 features: 1489 us; queries in shared memory 1683, and with two
// products in flight besides 1747); above, two of 232 (causal, 2048 tokens, 128 features: three
// with 64 keys lose 12 %, two stages of queries and of keys 55 %).
template <int kHeadDim, bool kTree = false>
struct PipelineTiling {
    static constexpr bool kHasTree = kTree;
    static constexpr bool kIsWide = kHeadDim > 64;
    static constexpr int kBlockN = 128;
    static constexpr int kStages = kHeadDim > 96 ? 3 : kIsWide ? 4 : 6;
    static constexpr int kNumWarpgroups = pipeline_rows(kHeadDim) / kTileRows;
    static constexpr int kQStages = 1;
    static constexpr int kConsumerRegisters = kIsWide ? 232 : 160;
    static constexpr bool kChangesScores = false;
    static constexpr bool kQInRegisters = !kIsWide;
    static constexpr bool kGroupsKeys = false;
};

struct SplitTiling {
    static constexpr bool kHasTree = false;
    static constexpr int kBlockN = 64;
    static constexpr int kStages = 2;
    static constexpr int kNumWarpgroups = 4;
    static constexpr int kQStages = 1;
    static constexpr int kConsumerRegisters = 0;
    static constexpr bool kChangesScores = false;
    static constexpr bool kQInRegisters = false;
    static constexpr bool kGroupsKeys = false;
};

template <typename C>
Params make_params(const PlannedAttentionParams& p, int num_tiles) {
    const PlanView plan =
        C::kHasTree ? view_tree_plan(p.plan, num_tiles) : view_plan(p.plan, num_tiles);
    const int64_t num_keys = C::kHasTree ? p.num_keys : p.total_tokens;
    Params params{};
    const auto map_keys = [&](const void* rows, int64_t stride) {
        return make_map<C>(p.dtype, rows, stride, num_keys, p.num_kv_heads, p.head_dim, C::kBlockN);
    };
    params.q =
        make_map<C>(p.dtype, p.q, p.q_stride, p.total_tokens, p.num_heads, p.head_dim, kTileRows);
    params.k = map_keys(p.k, p.k_stride);
    params.v = map_keys(p.v, p.v_stride);
    params.q_rows = p.q;
    params.k_rows = p.k;
    params.v_rows = p.v;
    params.out = p.out;
    params.row_bounds = plan.row_bounds;
    params.tiles = plan.tiles;
    params.used_tiles = plan.used_tiles;
    params.ancestors = plan.ancestors;
    params.counters = plan.counters;
    params.relative_bias = p.relative_bias;
    params.bias_positions = p.bias_positions;
    params.q_stride = p.q_stride;
    params.k_stride = p.k_stride;
    params.v_stride = p.v_stride;
    params.out_stride = p.out_stride;
    params.total_tokens = static_cast<int>(p.total_tokens);
    params.num_heads = p.num_heads;
    params.group = p.num_heads / p.num_kv_heads;
    params.head_dim = p.head_dim;
    params.window = p.window;
    params.bias_span = p.relative_bias_span;
    params.causal = p.causal;
    params.softmax_scale = p.softmax_scale;
    params.power_scale = p.softmax_scale * kLog2e;
    params.softcap = p.softcap;
    if (p.softcap > 0.0f) {
        params.capped = {2.0f * kLog2e * p.softmax_scale / p.softcap, p.softcap * kLog2e};
    }
    return params;
}

template <typename T, int kHeadDim, bool kChanges, bool kTree = false>
void launch_tiles(const PlannedAttentionParams& p, int num_tiles, cudaStream_t stream) {
    using Tiling = TileTiling<kHeadDim, kChanges, kTree>;
    using C = TileTypes<T, kHeadDim, Tiling>;
    constexpr auto kKernel = tile_kernel<C, Tiling::kMinCtas>;
    constexpr int kSmemBytes = sizeof(TileSmem<C>);
    allow_smem_once<kKernel>(kSmemBytes);
    // The bound on tiles is far off for short sequences, and of many CTAs those that find none cost
    // time: as many as full tiles would be, of which some take a second one, are 3 to 8 % faster at
    // means to 78. In two rounds of CTAs it is the second tile that costs time.
    const auto full = static_cast<int>(p.total_tokens / kTileRows);
    const bool is_few = num_tiles * p.num_heads <= 2 * Tiling::kMinCtas * num_sms();
    const int rows_of_ctas = kTree || is_few ? num_tiles : std::min(num_tiles, full + 1);
    const dim3 grid(p.num_heads, rows_of_ctas);  // heads of a tile run together: rows adjoin
    launch_kernel(kKernel, LaunchShape{grid, 128, kSmemBytes, stream},
                  make_params<C>(p, num_tiles));
}

template <typename T, int kHeadDim>
void launch_split(const PlannedAttentionParams& p, int num_tiles, cudaStream_t stream) {
    using C = TileTypes<T, kHeadDim, SplitTiling>;
    constexpr auto kKernel = split_kernel<C>;
    constexpr int kSmemBytes = sizeof(SplitSmem<C>);
    allow_smem_once<kKernel>(kSmemBytes);
    const dim3 grid(p.num_heads, num_tiles), block(128 * C::kNumWarpgroups);
    launch_kernel(kKernel, LaunchShape{grid, block, kSmemBytes, stream},
                  make_params<C>(p, num_tiles));
}

template <typename T, int kHeadDim, bool kTree = false>
void launch_pipeline(const PlannedAttentionParams& p, int num_tiles, cudaStream_t stream) {
    using Tiling = PipelineTiling<kHeadDim, kTree>;
    using C = TileTypes<T, kHeadDim, Tiling>;
    using Source = std::conditional_t<kTree, TreeSource<C>, PackedSource<C>>;
    constexpr auto kKernel = pipeline_kernel<C, Source>;
    constexpr int kSmemBytes = sizeof(PipelineSmem<C, Source>);
    allow_smem_once<kKernel>(kSmemBytes);
    const dim3 grid(std::min(num_sms(), num_tiles * p.num_heads));
    const dim3 block(128 * (C::kNumWarpgroups + 1));
    launch_kernel(kKernel, LaunchShape{grid, block, kSmemBytes, stream},
                  make_params<C>(p, num_tiles));
}

template <typename T, int kHeadDim>
void launch_typed(const PlannedAttentionParams& p, cudaStream_t stream) {
    const auto num_tiles =
        static_cast<int>(max_tiles(p.batch_size, p.total_tokens, p.tile_rows, p.batch_invariant));
    const bool changes_scores = p.relative_bias != nullptr || p.softcap > 0.0f;
    if constexpr (kHeadDim <= kMaxSharedDim) {
        if (p.tile_rows == pipeline_rows(kHeadDim) && !changes_scores && !p.batch_invariant) {
            return launch_pipeline<T, kHeadDim>(p, num_tiles, stream);
        }
    }
    if (p.tile_rows != kTileRows) {
        throw std::invalid_argument("planned_attention: a plan of " + std::to_string(p.tile_rows) +
                                    " rows a tile is not for this head_dim, bias, softcap or "
                                    "batch_invariant");
    }
    if (changes_scores) return launch_tiles<T, kHeadDim, true>(p, num_tiles, stream);
    if constexpr (kHeadDim <= 64) {
        // A GPU with room for all tiles at once, and steps to share: two a sequence or more.
        const bool is_few = num_tiles * p.num_heads <= 2 * num_sms();
        if (is_few && !p.batch_invariant && p.total_tokens >= 2 * kTileRows * p.batch_size) {
            return launch_split<T, kHeadDim>(p, num_tiles, stream);
        }
    }
    launch_tiles<T, kHeadDim, false>(p, num_tiles, stream);
}

template <int kHeadDim>
void launch_attention(const PlannedAttentionParams& p, cudaStream_t stream) {
    if (p.dtype == DType::f16) return launch_typed<Half, kHeadDim>(p, stream);
    launch_typed<BFloat16, kHeadDim>(p, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_attention<32>(const PlannedAttentionParams& p, cudaStream_t stream);

extern template void launch_attention<64>(const PlannedAttentionParams& p, cudaStream_t stream);

extern template void launch_attention<96>(const PlannedAttentionParams& p, cudaStream_t stream);

extern template void launch_attention<128>(const PlannedAttentionParams& p, cudaStream_t stream);

extern template void launch_attention<256>(const PlannedAttentionParams& p, cudaStream_t stream);

}  // namespace bytetx::attention
