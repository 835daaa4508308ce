// Varlen attention on the CPU: checks, choice of kernel, and the distribution of work over threads.
//
// The work is cut into items (a head of a sequence, and up to kGroupQueries of its query rows) that
// depend on nothing but their own sequence, so a result is bitwise the same in any batch and on any
// number of threads.  work_queue.h distributes them over the threads.
//
// workspace:  the queue's | scratch of thread 0, 1, ...
// The kernels are in attention_kernel.h.
#include "cpu/attention.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/attention_work.h"
#include "cpu/isa.h"
#include "ops.h"

namespace bytetx {
namespace {

using cpu::AttentionInput;
using cpu::AttentionKernels;
using cpu::TileWork;
using cpu::WorkQueue;

void require(bool condition, const char* what, int64_t got) {
    if (condition) return;
    throw std::invalid_argument(std::string("varlen_attention: ") + what + ", got " +
                                std::to_string(got));
}

// A tree's rows of keys: those before each sequence's own, and its own.
void check_key_rows(const VarlenAttentionParams& p) {
    require(p.causal && p.relative_bias == nullptr,
            "key_rows are for causal attention without a bias, causal", p.causal);
    require(p.cu_keys[0] == 0, "cu_keys must start at 0", p.cu_keys[0]);
    for (int64_t i = 0; i < p.batch_size; ++i) {
        const int64_t seqlen = p.cu_seqlens[i + 1] - p.cu_seqlens[i];
        const int64_t num_keys = p.cu_keys[i + 1] - p.cu_keys[i];
        require(num_keys >= seqlen && num_keys <= std::numeric_limits<int32_t>::max(),
                "cu_keys must give each sequence its own tokens at least, a length", num_keys);
    }
    uint32_t largest = 0;  // a negative row is larger than all others
    for (int64_t i = 0; i < p.cu_keys[p.batch_size]; ++i) {
        largest = std::max(largest, static_cast<uint32_t>(p.key_rows[i]));
    }
    require(p.cu_keys[p.batch_size] == 0 || largest < p.num_keys,
            "key_rows must be rows of k, below num_keys", static_cast<int32_t>(largest));
}

void check(const VarlenAttentionParams& p, int num_threads) {
    require(p.batch_size >= 0, "batch_size must not be negative", p.batch_size);
    require(p.head_dim > 0, "head_dim must be positive", p.head_dim);
    require(p.num_heads > 0, "num_heads must be positive", p.num_heads);
    require(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
            "num_kv_heads must divide num_heads", p.num_kv_heads);
    require(p.dtype == DType::f32 || p.dtype == DType::bf16, "dtype must be f32 or bf16",
            static_cast<int64_t>(p.dtype));
    const int64_t needed = varlen_attention_workspace_bytes(p.batch_size, p.head_dim, num_threads);
    if (p.workspace_bytes < needed) {
        throw std::invalid_argument("varlen_attention: workspace must have " +
                                    std::to_string(needed) + " bytes, got " +
                                    std::to_string(p.workspace_bytes));
    }
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
    require(p.softcap >= 0, "softcap must not be negative", static_cast<int64_t>(p.softcap));
    require(p.window >= 0, "window must not be negative", p.window);
    require(p.relative_bias == nullptr || p.relative_bias_span >= longest,
            "relative_bias must span the longest sequence, its span", p.relative_bias_span);
    if (p.key_rows != nullptr) check_key_rows(p);
}

AttentionInput input_of(const VarlenAttentionParams& p) {
    AttentionInput in{};
    in.q = p.q;
    in.k = p.k;
    in.v = p.v;
    in.out = p.out;
    in.cu_seqlens = p.cu_seqlens;
    in.page_table = p.key_rows;
    in.cu_pages = p.cu_keys;
    in.relative_bias = p.relative_bias;
    in.bias_positions = p.bias_positions;
    in.sinks = p.sinks;
    in.relative_bias_span = p.relative_bias_span;
    in.num_heads = p.num_heads;
    in.num_kv_heads = p.num_kv_heads;
    in.head_dim = p.head_dim;
    in.window = p.window;
    in.causal = p.causal;
    in.q_stride = p.q_stride;
    in.k_stride = p.k_stride;
    in.v_stride = p.v_stride;
    in.out_stride = p.out_stride;
    in.softmax_scale = p.softmax_scale;
    in.softcap = p.softcap;
    return in;
}

}  // namespace

cpu::AttentionKernels cpu::choose_attention(Isa isa, DType dtype) {
    AttentionKernels kernels{};
#if defined(__x86_64__)
    if (has(isa, Isa::avx512)) kernels = attention_avx512(dtype);
    if (has(isa, Isa::avx512_bf16) && dtype == DType::bf16) {
        const auto widened = kernels.attend;
        kernels = attention_avx512bf16(dtype);
        // Decode steps wait for memory, whatever multiplies.
        if (has(isa, Isa::slow_bf16_dot)) kernels.attend = widened;
    }
    if (kernels.attend == nullptr && has(isa, Isa::avx2)) kernels = attention_avx2(dtype);
#elif defined(__aarch64__)
    if (has(isa, Isa::neon_bf16)) kernels = attention_neonbf16(dtype);
    if (kernels.attend == nullptr && has(isa, Isa::neon)) kernels = attention_neon(dtype);
#endif
    return kernels.attend == nullptr ? attention_portable(dtype) : kernels;
}

int64_t varlen_attention_workspace_bytes(int64_t batch_size, int32_t head_dim, int num_threads) {
    const int64_t scratch = (num_threads > 1 ? num_threads : 1) * cpu::scratch_bytes(head_dim);
    return WorkQueue<TileWork>::workspace_bytes(batch_size) + scratch;
}

void varlen_attention(const VarlenAttentionParams& p, const Launch& launch) {
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
    queue.run(launch.num_threads, scratch, cpu::scratch_bytes(p.head_dim),
              [&](int32_t sequence, int64_t index, float* own) {
                  kernels.attend(in, tiles.item(sequence, index), own);
              });
}

}  // namespace bytetx
