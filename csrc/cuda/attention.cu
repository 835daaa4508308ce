// Attention over packed sequences on Hopper: wgmma, TMA, a plan made once a batch.
//
//   out[i] = sum_j softmax_j(cap(q[i] . k[j] * softmax_scale) + bias[position(j) - position(i)])
//   v[j]
//
// over the keys j of i's sequence; causal: j <= i; window: |i - j| < window; cap(s) is s or softcap
// * tanh(s / softcap). q [total,
// num_heads, head_dim], k and v [total, num_kv_heads, head_dim], f16 or bf16, rows any stride
// apart; scores, softmax and sums in f32; weights rounded to the element type for the second
// product.
//
// Tiles of 64 rows (attention_plan.cu) hold several sequences or a part of one; scores of foreign
// keys are computed and masked (attention_tile.cuh, attention_rows.cuh). Three kernels: a CTA of
// one warpgroup a tile and head (attention_kernels.cuh); for long sequences persistent CTAs of two
// or three warpgroups that share keys (attention_pipeline.cuh); for few tiles four warpgroups that
// split a tile's keys (attention_split.cuh). Head sizes between 32, 64, 96, 128 and 256 are filled
// up with zeros by TMA. Above 128 features, and where scores are capped or biased, the first kernel
// serves all lengths.
//
// Bytes: q, k, v, out once each from DRAM, which bounds short sequences; keys and values from L2
// once a tile that sees them. Longer ones are bound by the latency of a step, by issue slots, MUFU
// (one exponential a score, 16 a clock and SM) and wgmma in nearly equal parts. Fractions:
// docs/kernels/attention.md.
//
// Without batch_invariant, a row's result depends on its batch in two ways, both in the last bits:
// where in a tile its sequence starts decides in which groups of 16 the matrix unit adds products,
// and the mean length and the number of tiles decide between the kernels. Sequences longer than a
// tile start one, so under one choice of kernel theirs never change.
//
// Sources: FlashAttention-2 (arXiv 2307.08691) and -3 (arXiv 2407.08608) for the tile's arithmetic,
// ByteTransformer (arXiv 2210.03052) for packed rows; tiles across sequences are our own.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "cuda/attention_plan.cuh"
#include "ops.h"

namespace bytetx {
namespace attention {

template <int kHeadDim>
void launch_attention(const PlannedAttentionParams& p,
                      cudaStream_t stream);  // attention_launch.cuh
template <int kHeadDim>
void launch_tree_attention(const PlannedAttentionParams& p, cudaStream_t stream);

}  // namespace attention

namespace {

constexpr int kVecElements = 8;  // 16 bytes: what TMA and the store move at least

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

void check(const PlannedAttentionParams& p) {
    const auto fail = [](const std::string& what) {
        throw std::invalid_argument("planned_attention needs " + what);
    };
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) fail("f16 or bf16");
    if (p.head_dim <= 0 || p.head_dim > 256 || p.head_dim % kVecElements != 0) {
        fail("head_dim a multiple of 8 up to 256, got " + std::to_string(p.head_dim));
    }
    if (p.num_kv_heads <= 0 || p.num_heads % p.num_kv_heads != 0) {
        fail("num_kv_heads to divide num_heads, got " + std::to_string(p.num_kv_heads) + " and " +
             std::to_string(p.num_heads));
    }
    for (const int64_t stride : {p.q_stride, p.k_stride, p.v_stride, p.out_stride}) {
        if (stride % kVecElements != 0) {
            fail("row strides that are multiples of 8, got " + std::to_string(stride));
        }
    }
    if (!is_aligned(p.q) || !is_aligned(p.k) || !is_aligned(p.v) || !is_aligned(p.out) ||
        !is_aligned(p.plan)) {
        fail("16-byte aligned addresses");
    }
    if (!(p.softmax_scale > 0.0f)) {
        fail("softmax_scale > 0, got " + std::to_string(p.softmax_scale));
    }
    if (!(p.softcap >= 0.0f)) fail("softcap >= 0, got " + std::to_string(p.softcap));
    if (p.num_tiles > 0 && (!p.causal || p.relative_bias != nullptr || p.softcap > 0.0f)) {
        fail("causal attention without bias and softcap in a tree");
    }
}

}  // namespace

// Warpgroups that share keys need a half or a third of the traffic from L2, and sequences long
// enough to occupy them all (H200, tiles of 64 rows against these: 2048 tokens a sequence, causal,
// 128 features 589 against 472 us, mean 124 112 against 123; 64 features, 1024 tokens 427 against
// 460, 4096 tokens 1537 against 1489). head_dim 0: scores are biased or capped, which only tiles of
// 64 do.
int32_t attention_tile_rows(int64_t batch_size, int64_t total_tokens, int32_t head_dim) {
    const int64_t long_mean = head_dim > 64 ? 512 : 2048;
    const bool is_shared = head_dim > 0 && head_dim <= attention::kMaxSharedDim;
    const bool is_long = is_shared && total_tokens >= long_mean * batch_size;
    return is_long ? attention::pipeline_rows(head_dim) : 64;
}

void planned_attention(const PlannedAttentionParams& p, const Launch& launch) {
    check(p);
    if (p.total_tokens == 0 || p.batch_size == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_at_least<32, 64, 96, 128, 256>(p.head_dim, [&]<int kHeadDim>() {
        if (p.num_tiles > 0) return attention::launch_tree_attention<kHeadDim>(p, stream);
        attention::launch_attention<kHeadDim>(p, stream);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
