// Attention over paged keys on Hopper, by a plan made once a step (paged_plan.cu).
//
//   out[i] = sum_j softmax_j(cap(q[i] . k[j] * softmax_scale) + slope * (j - i)) v[j]
//
// over keys j <= i, j > i - window; cap(s) is s or softcap * tanh(s / softcap). q [total,
// num_heads, head_dim] f16 or bf16; k and v in pages [num_pages, page_size, num_kv_heads,
// head_dim]; scores, softmax and sums in f32, weights rounded to the element type for the second
// product. Sequences of one row go to the decode kernel (paged_decode.cuh), or where they are few
// to clusters (paged_cluster.cuh), longer pieces to the prefill kernel. A sequence's result depends
// on its own rows, keys and lengths, and on whether the batch is small or large (paged_plan.cuh),
// never on the other sequences. With batch_invariant, all go to the prefill kernel, in which a
// row's bits depend on its own keys alone, not on the piece that it is in (but with slopes, whose
// scores are taken from the tile's first token).

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cache_ops.h"
#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "cuda/paged_decode.cuh"

namespace bytetx {
namespace paged {

template <int kHeadDim>
void launch_prefill(const PlannedPagedAttentionParams& p,
                    cudaStream_t stream);  // paged_prefill.cuh
void launch_cluster(const PlannedPagedAttentionParams& p, const DecodeParams& rows,
                    cudaStream_t stream);  // paged_cluster.cu

}  // namespace paged

namespace {

constexpr int64_t kAlignment = 16;

int64_t states_bytes(const PagedPlanParams& p) {
    const int64_t bytes =
        paged::plan_sizes(p).partial_rows * p.num_kv_heads * int64_t{sizeof(SoftmaxState)};
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void check(const PlannedPagedAttentionParams& p) {
    const auto fail = [](const std::string& what) {
        throw std::invalid_argument("planned_paged_attention needs " + what);
    };
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) fail("f16 or bf16");
    if (p.plan.head_dim <= 0 || p.plan.head_dim > 256 || p.plan.head_dim % 8 != 0) {
        fail("head_dim a multiple of 8 up to 256, got " + std::to_string(p.plan.head_dim));
    }
    if (p.plan.num_kv_heads <= 0 || p.plan.num_heads % p.plan.num_kv_heads != 0) {
        fail("num_kv_heads to divide num_heads, got " + std::to_string(p.plan.num_kv_heads) +
             " and " + std::to_string(p.plan.num_heads));
    }
    const int most_heads =
        p.plan.head_dim > 128 ? paged::most_unit_rows(p.plan.head_dim) : p.plan.num_heads;
    if (p.plan.num_heads / p.plan.num_kv_heads > most_heads) {
        fail("at most " + std::to_string(most_heads) + " query heads a key head of " +
             std::to_string(p.plan.head_dim) + " features, got " +
             std::to_string(p.plan.num_heads / p.plan.num_kv_heads));
    }
    if (p.plan.head_dim > 128 && (p.plan.max_seqlen > 1 || p.plan.batch_invariant)) {
        fail("one row a sequence of heads above 128 features, not batch-invariant, got " +
             std::to_string(p.plan.max_seqlen));
    }
    if (p.plan.batch_invariant && p.alibi_slopes != nullptr) {
        fail("no slopes where it is batch-invariant");
    }
    if ((p.k_scales == nullptr) != (p.v_scales == nullptr)) fail("both scales, or neither");
    if (p.k_scales != nullptr) {
        if (p.plan.head_dim % 16 != 0 || p.page_size < paged::kStepKeys) {
            fail("codes of 16 features' multiples in pages of 16 keys or more, got " +
                 std::to_string(p.plan.head_dim) + " in pages of " + std::to_string(p.page_size));
        }
        if (p.plan.max_seqlen > 1 || p.plan.batch_invariant) {
            fail("one row a sequence of codes, not batch-invariant, got " +
                 std::to_string(p.plan.max_seqlen));
        }
    }
    if (p.page_size <= 0 || (p.page_size & (p.page_size - 1)) != 0) {
        fail("a page_size that is a power of two, got " + std::to_string(p.page_size));
    }
    if (p.q_stride % 8 != 0) fail("rows of q a multiple of 8 apart");
    if (!(p.softmax_scale > 0.0f))
        fail("softmax_scale > 0, got " + std::to_string(p.softmax_scale));
    if (!(p.softcap >= 0.0f)) fail("softcap >= 0, got " + std::to_string(p.softcap));
    const int64_t needed = planned_paged_attention_workspace_bytes(p.plan);
    if (p.workspace_bytes < needed) {
        fail(std::to_string(needed) + " bytes of workspace, got " +
             std::to_string(p.workspace_bytes));
    }
    for (const void* address :
         {p.q, p.k_cache, p.v_cache, static_cast<const void*>(p.k_scales),
          static_cast<const void*>(p.v_scales), static_cast<const void*>(p.out),
          static_cast<const void*>(p.plan.plan), static_cast<const void*>(p.workspace)}) {
        if (reinterpret_cast<std::uintptr_t>(address) % kAlignment != 0) fail("aligned addresses");
    }
}

paged::DecodeParams decode_params(const PlannedPagedAttentionParams& p) {
    const paged::PlanView view = paged::view_plan(p.plan.plan, paged::plan_sizes(p.plan));
    paged::DecodeParams params{};
    params.q = p.q;
    params.k_cache = p.k_cache;
    params.v_cache = p.v_cache;
    params.k_scales = p.k_scales;
    params.v_scales = p.v_scales;
    params.out = p.out;
    params.page_table = p.page_table;
    params.header = view.header;
    params.items = view.items;
    params.counters = view.counters;
    params.partial_states = static_cast<SoftmaxState*>(p.workspace);
    params.partial_out =
        reinterpret_cast<float*>(static_cast<uint8_t*>(p.workspace) + states_bytes(p.plan));
    params.max_pages = p.max_pages;
    params.q_stride = p.q_stride;
    while (1 << params.page_shift < p.page_size) ++params.page_shift;
    params.num_heads = p.plan.num_heads;
    params.num_kv_heads = p.plan.num_kv_heads;
    params.group = p.plan.num_heads / p.plan.num_kv_heads;
    params.head_dim = p.plan.head_dim;
    params.window = p.plan.window;
    params.scale = p.softmax_scale * kLog2e;
    params.change = paged::score_change(p);
    params.beside_tiles = paged::runs_side_by_side(p.plan);
    params.early_read = params.beside_tiles ? 0 : p.early_read;
    return params;
}

template <typename C>
void launch_decode(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(paged::DecodeSmem<C>);
    const auto kernel = paged::decode_kernel<C>;
    allow_smem(kernel, kSmemBytes);
    const int64_t most = paged::plan_sizes(p.plan).items * p.plan.num_kv_heads;
    const int64_t resident = int64_t{num_sms()} * C::kMinCtas;
    const LaunchShape shape{static_cast<unsigned>(std::min(most, resident)), paged::kDecodeThreads,
                            kSmemBytes, stream};
    launch_kernel(kernel, shape, decode_params(p));
}

template <typename T, int kHeadDim, bool kCodes>
void launch_decode(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    if constexpr (kHeadDim == 128) {
        if (paged::has_sm_alone(p.plan, num_sms())) {
            return launch_decode<paged::AloneTypes<T, kCodes>>(p, stream);
        }
    }
    if (paged::unit_tiles(p.plan) == 1) {
        return launch_decode<paged::DecodeTypes<T, kHeadDim, 1, kCodes>>(p, stream);
    }
    if constexpr (kHeadDim <= 128) {
        launch_decode<paged::DecodeTypes<T, kHeadDim, 2, kCodes>>(p, stream);
    }
}

template <int kHeadDim, bool kCodes>
void launch_decode(const PlannedPagedAttentionParams& p, cudaStream_t stream) {
    if (p.dtype == DType::f16) return launch_decode<__half, kHeadDim, kCodes>(p, stream);
    launch_decode<__nv_bfloat16, kHeadDim, kCodes>(p, stream);
}

}  // namespace

int64_t planned_paged_attention_workspace_bytes(const PagedPlanParams& p) {
    const int64_t rows = paged::plan_sizes(p).partial_rows;
    return states_bytes(p) +
           rows * p.num_kv_heads * paged::padded_dim(p.head_dim) * int64_t{sizeof(float)};
}

void planned_paged_attention(const PlannedPagedAttentionParams& p, const Launch& launch) {
    check(p);
    if (p.plan.total_tokens == 0 || p.plan.batch_size == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    const auto run_tiles = [&] {
        dispatch_at_least<64, 96, 128>(
            p.plan.head_dim, [&]<int kHeadDim>() { paged::launch_prefill<kHeadDim>(p, stream); });
    };
    const bool has_tiles = p.plan.tile_tokens > 0 && p.plan.max_seqlen > 1;
    const bool tiles_first = paged::runs_side_by_side(p.plan);  // they leave SMs to the rows
    if (tiles_first || p.plan.batch_invariant) run_tiles();
    if (p.plan.batch_invariant) {
        BYTETX_CUDA_CHECK(cudaGetLastError());
        return;
    }
    if (paged::uses_clusters(p.plan)) {
        paged::launch_cluster(p, decode_params(p), stream);
    } else if (p.k_scales != nullptr) {
        dispatch_at_least<64, 128, 256>(
            p.plan.head_dim, [&]<int kHeadDim>() { launch_decode<kHeadDim, true>(p, stream); });
    } else {
        dispatch_at_least<32, 64, 128, 256>(
            p.plan.head_dim, [&]<int kHeadDim>() { launch_decode<kHeadDim, false>(p, stream); });
    }
    if (has_tiles && !tiles_first) run_tiles();
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
