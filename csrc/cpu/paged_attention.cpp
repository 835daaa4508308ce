// Attention over keys in pages on the CPU: checks, and the distribution of work over threads.
//
// A sequence with one row (decode) is cut by runs of kDecodeKeys keys, and where these are few by
// heads of k and v; the thread that ends the last run of some heads merges them.  Any other is cut
// as in attention.cpp.  Runs depend on nothing but the sequence and other cuts move no bit, so that
// a result is bitwise the same in any batch and on any number of threads.  A row alone differs in
// the last bits from the same row of a longer piece, unless batch_invariant sends it to the tiles.
//
// workspace:  the queue's | first partial result of each sequence, in words, int64 [batch_size] |
//             runs ended, int32 [batch_size, num_kv_heads] | partial results [sequence, run, head]
//             | scratch of thread 0, 1, ...
// The kernels are in attention_kernel.h and attention_decode.h.
#include <bit>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/paged.h"

namespace bytetx {
namespace cpu {
namespace {

AttentionInput input_of(const PagedAttentionParams& p) {
    AttentionInput in{};
    in.q = p.q;
    in.k = p.k_cache;
    in.v = p.v_cache;
    in.out = p.out;
    in.cu_seqlens = p.cu_seqlens;
    in.kv_seqlens = p.kv_seqlens;
    in.page_table = p.page_table;
    in.max_pages = p.max_pages;
    in.page_shift = std::bit_width(static_cast<uint32_t>(p.page_size)) - 1;
    in.num_heads = p.num_heads;
    in.num_kv_heads = p.num_kv_heads;
    in.head_dim = p.head_dim;
    in.window = p.window;
    in.causal = true;
    in.q_stride = p.q_stride;
    in.k_stride = in.v_stride = int64_t{p.num_kv_heads} * p.head_dim;
    in.out_stride = int64_t{p.num_heads} * p.head_dim;
    in.softmax_scale = p.softmax_scale;
    in.softcap = p.softcap;
    in.alibi_slopes = p.alibi_slopes;
    in.k_scales = p.k_scales;
    in.v_scales = p.v_scales;
    return in;
}

[[noreturn]] void refuse(const std::string& what) {
    throw std::invalid_argument("paged_attention: " + what);
}

void require(bool condition, const char* what, int64_t got) {
    if (!condition) refuse(std::string(what) + ", got " + std::to_string(got));
}

void check_sizes(const PagedAttentionParams& p) {
    require(p.batch_size >= 0, "batch_size must not be negative", p.batch_size);
    require(p.head_dim > 0, "head_dim must be positive", p.head_dim);
    require(p.num_heads > 0, "num_heads must be positive", p.num_heads);
    require(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
            "num_kv_heads must divide num_heads", p.num_kv_heads);
    require(p.num_heads / p.num_kv_heads <= kGroupQueries,
            "num_heads / num_kv_heads must be at most 256", p.num_heads / p.num_kv_heads);
    require(p.page_size >= 2 && std::has_single_bit(static_cast<uint32_t>(p.page_size)),
            "page_size must be a power of two, 2 or more", p.page_size);
    require(p.softcap >= 0, "softcap must not be negative", static_cast<int64_t>(p.softcap));
    require((p.k_scales == nullptr) == (p.v_scales == nullptr),
            "k_scales and v_scales must be given both or neither, v_scales", p.v_scales != nullptr);
    require(p.window >= 0, "window must not be negative", p.window);
    require(p.dtype == DType::f32 || p.dtype == DType::bf16, "dtype must be f32 or bf16",
            static_cast<int64_t>(p.dtype));
}

// Lengths, and the pages of all keys that will be read.
void check_sequences(const PagedAttentionParams& p, const AttentionInput& in) {
    require(p.cu_seqlens[0] == 0, "cu_seqlens must start at 0", p.cu_seqlens[0]);
    require(p.cu_seqlens[p.batch_size] == p.total_tokens, "cu_seqlens must end at total_tokens",
            p.cu_seqlens[p.batch_size]);
    for (int64_t i = 0; i < p.batch_size; ++i) {
        const int32_t seqlen = in.num_queries(i), kv_seqlen = in.num_keys(i);
        require(seqlen >= 0, "cu_seqlens must not decrease, a length", seqlen);
        if (seqlen == 0) continue;
        const std::string index = std::to_string(i);
        if (kv_seqlen < seqlen || kv_seqlen > p.max_pages * p.page_size) {
            refuse("kv_seqlens[" + index + "] must be from " + std::to_string(seqlen) +
                   ", this step's tokens, to " + std::to_string(p.max_pages * p.page_size) +
                   ", what page_table holds, got " + std::to_string(kv_seqlen));
        }
        const int32_t* pages = p.page_table + i * p.max_pages;
        const int32_t last = (kv_seqlen - 1) >> in.page_shift;
        for (int32_t at = first_key(in, i) >> in.page_shift; at <= last; ++at) {
            if (static_cast<uint32_t>(pages[at]) < static_cast<uint64_t>(p.num_pages)) continue;
            refuse("page_table[" + index + "] must name pages below " +
                   std::to_string(p.num_pages) + ", got " + std::to_string(pages[at]) +
                   " for page " + std::to_string(at));
        }
    }
}

const PagedAttentionParams& checked(const PagedAttentionParams& p) {
    check_sizes(p);
    check_sequences(p, input_of(p));
    return p;
}

}  // namespace

int64_t PagedAttention::workspace_bytes(const PagedAttentionParams& p, int num_threads) {
    const AttentionInput in = input_of(p);
    return PagedLayout({in, {in}, !p.batch_invariant}, p.batch_size, num_threads).end;
}

PagedAttention::PagedAttention(const PagedAttentionParams& p, const Launch& launch)
    : in_(input_of(checked(p))),
      kernels_(choose_attention(resolve_isa(launch.isa), p.dtype)),
      work_([&] {
          PagedWork work{in_, {in_}, !p.batch_invariant};
          const int64_t end = PagedLayout(work, p.batch_size, launch.num_threads).end;
          require(p.workspace_bytes >= end,
                  ("workspace must have " + std::to_string(end) + " bytes").c_str(),
                  p.workspace_bytes);
          work.cut(p.batch_size, launch.num_threads);
          return work;
      }()),
      layout_(work_, p.batch_size, launch.num_threads),
      queue_(p.batch_size, p.workspace, work_),
      batch_size_(p.batch_size),
      workspace_(static_cast<char*>(p.workspace)),
      first_partials_(reinterpret_cast<int64_t*>(workspace_ + layout_.first_partials)),
      ended_(reinterpret_cast<int32_t*>(workspace_ + layout_.ended)),
      partials_(reinterpret_cast<float*>(workspace_ + layout_.partials)) {
    int64_t words = 0;
    for (int64_t i = 0; i < batch_size_; ++i) {
        first_partials_[i] = words;
        words += work_.partial_words(i);
    }
    std::fill_n(ended_, batch_size_ * in_.num_kv_heads, 0);
}

void PagedAttention::run(int num_threads) {
    queue_.run(
        num_threads, workspace_ + layout_.scratch, scratch_bytes(in_.head_dim),
        [&](int32_t sequence, int64_t index, float* own) { run_item(in_, sequence, index, own); });
}

void PagedAttention::run_layer(Team& team, int32_t thread, const void* k_cache, const void* v_cache,
                               float softmax_scale) {
    AttentionInput in = in_;
    in.softmax_scale = softmax_scale;
    in.k = k_cache;
    in.v = v_cache;
    auto* own = reinterpret_cast<float*>(workspace_ + layout_.scratch +
                                         thread * scratch_bytes(in_.head_dim));
    const int64_t num_draws = team.size() == 1 ? 1 : team.size() * kDrawsPerThread;
    const auto run = [&](int32_t sequence, int64_t index, float* scratch) {
        run_item(in, sequence, index, scratch);
    };
    team.share(num_draws, 1,
               [&](int64_t draw, int64_t) { queue_.run_draw(draw, num_draws, own, run); });
}

void PagedAttention::run_item(const AttentionInput& in, int32_t sequence, int64_t index,
                              float* own) const {
    if (work_.is_decode(sequence)) return decode(in, sequence, index, own);
    kernels_.attend(in, work_.tiles.item(sequence, index), own);
}

// A decode item, and the merge where it is the last of its head to end. Heads of one run follow
// each other: their rows of k and v lie side by side.
void PagedAttention::decode(const AttentionInput& in, int32_t sequence, int64_t index,
                            float* own) const {
    const auto first_head = static_cast<int32_t>(index % work_.head_items()) * work_.kv_heads;
    const int32_t num_heads = std::min(work_.kv_heads, in.num_kv_heads - first_head);
    const auto run = static_cast<int32_t>(index / work_.head_items());
    const int32_t begin = (work_.first_run(sequence) + run) * kDecodeKeys;
    const int32_t first = std::max(begin, first_key(in, sequence));
    const int32_t end = std::min(begin + kDecodeKeys, in.num_keys(sequence));
    const int32_t num_runs = work_.num_runs(sequence);
    DecodeItem item{sequence, first_head, num_heads, first, end - first, nullptr};
    if (num_runs == 1) return kernels_.decode(in, item, own);
    float* partials = partials_ + first_partials_[sequence];
    item.partials = partials + run * in.num_heads * decode_partial_words(in.head_dim);
    kernels_.decode(in, item, own);
    // Acquires what the other runs' threads released here.
    std::atomic_ref<int32_t> ended(ended_[int64_t{sequence} * in.num_kv_heads + first_head]);
    if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < num_runs) return;
    ended.store(0, std::memory_order_relaxed);  // for the next layer
    const int32_t group = in.num_heads / in.num_kv_heads;
    kernels_.merge(in, sequence, first_head * group, num_heads * group, partials, num_runs, own);
}

}  // namespace cpu

int64_t paged_attention_workspace_bytes(const PagedAttentionParams& p, int num_threads) {
    return cpu::PagedAttention::workspace_bytes(p, num_threads);
}

void paged_attention(const PagedAttentionParams& p, const Launch& launch) {
    cpu::check_sizes(p);
    if (p.batch_size == 0 || p.total_tokens == 0) return;
    cpu::PagedAttention(p, launch).run(launch.num_threads);
}

}  // namespace bytetx
