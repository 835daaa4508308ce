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
#include <algorithm>
#include <atomic>
#include <bit>
#include <stdexcept>
#include <string>

#include "cache_ops.h"
#include "cpu/attention.h"
#include "cpu/attention_work.h"
#include "cpu/isa.h"

namespace bytetx {
namespace {

using cpu::aligned;
using cpu::AttentionInput;
using cpu::AttentionKernels;
using cpu::kDecodeKeys;
using cpu::SequenceWork;
using cpu::TileWork;
using cpu::WorkQueue;

// One key costs a decode item its reading: as much as this many multiply-adds a feature.
constexpr int64_t kReadCost = 16;

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
    return in;
}

// The first key that a row of this step sees.
int32_t first_key(const AttentionInput& in, int64_t sequence) {
    const int32_t first_query = in.num_keys(sequence) - in.num_queries(sequence);
    return in.window > 0 ? std::max(0, first_query - in.window + 1) : 0;
}

// Items of decode rows and of others.
struct PagedWork {
    const AttentionInput& in;
    TileWork tiles;
    bool has_decode = true;
    int32_t kv_heads = 1;  // KV heads of one decode item

    bool is_decode(int64_t sequence) const { return has_decode && in.num_queries(sequence) == 1; }
    int32_t first_run(int64_t sequence) const { return first_key(in, sequence) / kDecodeKeys; }
    int32_t num_runs(int64_t sequence) const {
        return (in.num_keys(sequence) - 1) / kDecodeKeys + 1 - first_run(sequence);
    }
    int64_t head_items() const { return (in.num_kv_heads + kv_heads - 1) / kv_heads; }
    int64_t num_items(int64_t sequence) const {
        return is_decode(sequence) ? head_items() * num_runs(sequence)
                                   : tiles.num_items(in.num_queries(sequence));
    }
    SequenceWork operator()(int64_t sequence) const {
        if (!is_decode(sequence)) return tiles(sequence);
        const int64_t num_keys = in.num_keys(sequence) - first_key(in, sequence);
        const int64_t keys_an_item = (num_keys - 1) / num_runs(sequence) + 1;
        return {num_items(sequence),
                keys_an_item * kv_heads * in.head_dim * kReadCost + cpu::kItemCost};
    }
    // As large items as still keep the threads busy: rows of k and v hold all heads.
    void cut(int64_t batch_size, int num_threads) {
        const auto count = [&] {
            int64_t num_items = 0;
            for (int64_t i = 0; i < batch_size; ++i) num_items += this->num_items(i);
            return num_items;
        };
        kv_heads = std::min(in.num_kv_heads, cpu::kGroupQueries / (in.num_heads / in.num_kv_heads));
        while (num_threads > 1 && kv_heads > 1 && count() < 4 * num_threads) {
            kv_heads = (kv_heads + 1) / 2;
        }
        tiles.cut(count(), num_threads);
    }
    // Words of all heads in all runs, where there are partial results.
    int64_t partial_words(int64_t sequence) const {
        if (!is_decode(sequence) || num_runs(sequence) <= 1) return 0;
        return int64_t{in.num_heads} * num_runs(sequence) * cpu::decode_partial_words(in.head_dim);
    }
};

// Where the parts of the workspace begin, in bytes.
struct Layout {
    int64_t first_partials;
    int64_t ended;
    int64_t partials;
    int64_t scratch;
    int64_t end;

    Layout(const PagedWork& work, int64_t batch_size, int num_threads) {
        int64_t partial_words = 0;
        for (int64_t i = 0; i < batch_size; ++i) partial_words += work.partial_words(i);
        const int64_t num_counters = batch_size * work.in.num_kv_heads;
        first_partials = WorkQueue<PagedWork>::workspace_bytes(batch_size);
        ended = first_partials + aligned(batch_size * int64_t{sizeof(int64_t)});
        partials = ended + aligned(num_counters * int64_t{sizeof(int32_t)});
        scratch = partials + aligned(partial_words * int64_t{sizeof(float)});
        end = scratch + std::max(num_threads, 1) * cpu::scratch_bytes(work.in.head_dim);
    }
};

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
    require(p.num_heads / p.num_kv_heads <= cpu::kGroupQueries,
            "num_heads / num_kv_heads must be at most 256", p.num_heads / p.num_kv_heads);
    require(p.page_size >= 2 && std::has_single_bit(static_cast<uint32_t>(p.page_size)),
            "page_size must be a power of two, 2 or more", p.page_size);
    require(p.softcap >= 0, "softcap must not be negative", static_cast<int64_t>(p.softcap));
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

// A decode item, and the merge where it is the last of its head to end.
class Decoder {
  public:
    Decoder(const PagedWork& work, const AttentionKernels& kernels, char* workspace,
            const Layout& layout, int64_t batch_size)
        : work_(work),
          in_(work.in),
          kernels_(kernels),
          first_partials_(reinterpret_cast<int64_t*>(workspace + layout.first_partials)),
          ended_(reinterpret_cast<int32_t*>(workspace + layout.ended)),
          partials_(reinterpret_cast<float*>(workspace + layout.partials)) {
        std::fill_n(ended_, batch_size * in_.num_kv_heads, 0);
        int64_t words = 0;
        for (int64_t i = 0; i < batch_size; ++i) {
            first_partials_[i] = words;
            words += work.partial_words(i);
        }
    }

    // Heads of one run follow each other: their rows of k and v lie side by side.
    void run(int32_t sequence, int64_t index, float* scratch) const {
        const auto first_head = static_cast<int32_t>(index % work_.head_items()) * work_.kv_heads;
        const int32_t num_heads = std::min(work_.kv_heads, in_.num_kv_heads - first_head);
        const auto run = static_cast<int32_t>(index / work_.head_items());
        const int32_t begin = (work_.first_run(sequence) + run) * kDecodeKeys;
        const int32_t first = std::max(begin, first_key(in_, sequence));
        const int32_t end = std::min(begin + kDecodeKeys, in_.num_keys(sequence));
        const int32_t num_runs = work_.num_runs(sequence);
        cpu::DecodeItem item{sequence, first_head, num_heads, first, end - first, nullptr};
        if (num_runs == 1) return kernels_.decode(in_, item, scratch);
        float* partials = partials_ + first_partials_[sequence];
        item.partials = partials + run * in_.num_heads * cpu::decode_partial_words(in_.head_dim);
        kernels_.decode(in_, item, scratch);
        // Acquires what the other runs' threads released here.
        std::atomic_ref<int32_t> ended(ended_[int64_t{sequence} * in_.num_kv_heads + first_head]);
        if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < num_runs) return;
        const int32_t group = in_.num_heads / in_.num_kv_heads;
        kernels_.merge(in_, sequence, first_head * group, num_heads * group, partials, num_runs,
                       scratch);
    }

  private:
    const PagedWork& work_;
    const AttentionInput& in_;
    const AttentionKernels& kernels_;
    int64_t* first_partials_;
    int32_t* ended_;
    float* partials_;
};

}  // namespace

int64_t paged_attention_workspace_bytes(const PagedAttentionParams& p, int num_threads) {
    const AttentionInput in = input_of(p);
    return Layout({in, {in}, !p.batch_invariant}, p.batch_size, num_threads).end;
}

void paged_attention(const PagedAttentionParams& p, const Launch& launch) {
    check_sizes(p);
    if (p.batch_size == 0 || p.total_tokens == 0) return;
    const AttentionInput in = input_of(p);
    check_sequences(p, in);
    const AttentionKernels kernels = cpu::choose_attention(cpu::resolve_isa(launch.isa), p.dtype);
    PagedWork work{in, {in}, !p.batch_invariant};
    const Layout layout(work, p.batch_size, launch.num_threads);
    require(p.workspace_bytes >= layout.end,
            ("workspace must have " + std::to_string(layout.end) + " bytes").c_str(),
            p.workspace_bytes);
    work.cut(p.batch_size, launch.num_threads);
    const WorkQueue<PagedWork> queue(p.batch_size, p.workspace, work);
    auto* workspace = static_cast<char*>(p.workspace);
    const Decoder decoder(work, kernels, workspace, layout, p.batch_size);
    queue.run(launch.num_threads, workspace + layout.scratch, cpu::scratch_bytes(p.head_dim),
              [&](int32_t sequence, int64_t index, float* own) {
                  if (work.is_decode(sequence)) return decoder.run(sequence, index, own);
                  kernels.attend(in, work.tiles.item(sequence, index), own);
              });
}

}  // namespace bytetx
