// Disentangled attention on the CPU: checks, and the distribution of work over threads, which is
// that of attention.cpp. The kernels are those of varlen attention (attention_kernel.h), which add
// the scores of positions (attention_position.h).
#include <stdexcept>
#include <string>

#include "cpu/attention.h"
#include "cpu/attention_work.h"
#include "cpu/isa.h"
#include "disentangled_ops.h"

namespace bytetx {
namespace {

using cpu::AttentionInput;
using cpu::AttentionKernels;
using cpu::TileWork;
using cpu::WorkQueue;

int64_t thread_bytes(int32_t head_dim) {
    const int64_t words = cpu::PositionScratch::words(head_dim);
    return cpu::scratch_bytes(head_dim) + cpu::aligned(words * int64_t{sizeof(float)});
}

void require(bool condition, const char* what, int64_t got) {
    if (condition) return;
    throw std::invalid_argument(std::string("disentangled_attention: ") + what + ", got " +
                                std::to_string(got));
}

void check_buckets(const DisentangledAttentionParams& p, int32_t longest) {
    require(p.span >= longest, "buckets must span the longest sequence, its span", p.span);
    const int32_t* bucket_of = p.buckets + p.span - 1;
    for (int32_t distance = 1 - longest; distance < longest; ++distance) {
        const int32_t bucket = bucket_of[distance];
        require(bucket >= 0 && bucket < p.num_buckets, "buckets must be below num_buckets", bucket);
        if (distance == 1 - longest) continue;
        const int32_t step = bucket - bucket_of[distance - 1];
        require(step == 0 || step == 1, "buckets must grow by 0 or 1", step);
    }
}

void check(const DisentangledAttentionParams& p, int num_threads) {
    require(p.batch_size >= 0, "batch_size must not be negative", p.batch_size);
    require(p.head_dim > 0, "head_dim must be positive", p.head_dim);
    require(p.num_heads > 0, "num_heads must be positive", p.num_heads);
    require(p.dtype == DType::f32 || p.dtype == DType::bf16, "dtype must be f32 or bf16",
            static_cast<int64_t>(p.dtype));
    const int64_t needed =
        disentangled_attention_workspace_bytes(p.batch_size, p.head_dim, num_threads);
    require(p.workspace_bytes >= needed, "workspace is too small, its bytes", p.workspace_bytes);
    if (p.batch_size == 0) return;
    require(p.cu_seqlens[0] == 0, "cu_seqlens must start at 0", p.cu_seqlens[0]);
    require(p.cu_seqlens[p.batch_size] == p.total_tokens, "cu_seqlens must end at total_tokens",
            p.cu_seqlens[p.batch_size]);
    int32_t longest = 0;
    for (int64_t i = 0; i < p.batch_size; ++i) {
        const int32_t seqlen = p.cu_seqlens[i + 1] - p.cu_seqlens[i];
        require(seqlen >= 0, "cu_seqlens must not decrease, a length", seqlen);
        longest = seqlen > longest ? seqlen : longest;
    }
    if (longest > 0 && (p.pos_k != nullptr || p.pos_q != nullptr)) check_buckets(p, longest);
}

AttentionInput input_of(const DisentangledAttentionParams& p) {
    AttentionInput in{};
    in.q = p.q;
    in.k = p.k;
    in.v = p.v;
    in.out = p.out;
    in.cu_seqlens = p.cu_seqlens;
    in.relative_bias_span = p.span;
    in.num_heads = p.num_heads;
    in.num_kv_heads = p.num_heads;
    in.head_dim = p.head_dim;
    in.q_stride = p.q_stride;
    in.k_stride = p.k_stride;
    in.v_stride = p.v_stride;
    in.out_stride = p.out_stride;
    in.softmax_scale = p.softmax_scale;
    in.pos_k = p.pos_k;
    in.pos_q = p.pos_q;
    in.buckets = p.pos_k == nullptr && p.pos_q == nullptr ? nullptr : p.buckets;
    return in;
}

}  // namespace

int64_t disentangled_attention_workspace_bytes(int64_t batch_size, int32_t head_dim,
                                               int num_threads) {
    const int64_t scratch = (num_threads > 1 ? num_threads : 1) * thread_bytes(head_dim);
    return WorkQueue<TileWork>::workspace_bytes(batch_size) + scratch;
}

void disentangled_attention(const DisentangledAttentionParams& p, const Launch& launch) {
    check(p, launch.num_threads);
    if (p.batch_size == 0 || p.total_tokens == 0) return;
    const AttentionKernels kernels = cpu::choose_attention(cpu::resolve_isa(launch.isa), p.dtype);
    const AttentionInput in = input_of(p);
    TileWork tiles{in};
    int64_t num_items = 0;
    for (int64_t i = 0; i < p.batch_size; ++i) num_items += tiles.num_items(in.num_queries(i));
    tiles.cut(num_items, launch.num_threads);
    const WorkQueue<TileWork> queue(p.batch_size, p.workspace, tiles);
    char* scratch = static_cast<char*>(p.workspace) + queue.workspace_bytes(p.batch_size);
    queue.run(launch.num_threads, scratch, thread_bytes(p.head_dim),
              [&](int32_t sequence, int64_t index, float* own) {
                  kernels.attend(in, tiles.item(sequence, index), own);
              });
}

}  // namespace bytetx
