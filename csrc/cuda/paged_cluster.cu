// Launches of the decode kernel for few sequences; paged_attention.cu says what it computes.
#include <algorithm>

#include "cache_ops.h"
#include "common/dispatch.cuh"
#include "cuda/paged_cluster.cuh"

namespace bytetx::paged {
namespace {

template <typename C>
void launch_typed(const PlannedPagedAttentionParams& p, const DecodeParams& rows,
                  cudaStream_t stream) {
    ClusterParams params{};
    params.rows = rows;
    params.cu_seqlens = p.plan.cu_seqlens;
    params.kv_seqlens = p.plan.kv_seqlens;
    params.units = (rows.group + C::kRows - 1) / C::kRows;
    params.num_pages = static_cast<int>(
        std::min<int64_t>(p.max_pages, (p.plan.max_kv_seqlen + p.page_size - 1) / p.page_size));
    const auto kernel = cluster_kernel<C>;
    constexpr int kSmemBytes = sizeof(ClusterSmem<C>);
    allow_smem(kernel, kSmemBytes);
    const int64_t clusters = p.plan.batch_size * params.units * p.plan.num_kv_heads;
    const LaunchShape shape{static_cast<unsigned>(clusters * kClusterCtas), C::kThreads, kSmemBytes,
                            stream, kClusterCtas};
    launch_kernel(kernel, shape, params);
}

}  // namespace

void launch_cluster(const PlannedPagedAttentionParams& p, const DecodeParams& rows,
                    cudaStream_t stream) {
    const auto launch = [&]<int kHeadDim, bool kCodes>() {
        constexpr int kMostRows = most_unit_rows(kHeadDim);
        dispatch_at_least<8, kMostRows>(std::min(rows.group, kMostRows), [&]<int kRows>() {
            constexpr int kTiles = kRows / 8;
            if (p.dtype == DType::f16) {
                return launch_typed<ClusterTypes<__half, kHeadDim, kTiles, kCodes>>(p, rows,
                                                                                    stream);
            }
            launch_typed<ClusterTypes<__nv_bfloat16, kHeadDim, kTiles, kCodes>>(p, rows, stream);
        });
    };
    if (p.k_scales != nullptr) {
        dispatch_at_least<64, 128, 256>(
            p.plan.head_dim, [&]<int kHeadDim>() { launch.template operator()<kHeadDim, true>(); });
    } else {
        dispatch_at_least<32, 64, 128, 256>(p.plan.head_dim, [&]<int kHeadDim>() {
            launch.template operator()<kHeadDim, false>();
        });
    }
}

}  // namespace bytetx::paged
