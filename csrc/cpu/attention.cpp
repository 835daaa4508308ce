// Varlen attention on the CPU: checks, choice of kernel, and the sharing of work among threads.
//
// The work is cut into items (a head of a sequence, and up to kGroupQueries of its query rows) that
// depend on nothing but their own sequence, so a result is bitwise the same in any batch and on any
// number of threads.  Items stand in one line, those of long sequences first; a thread that is free
// draws the next stretch of about equal cost, so that neither one long sequence nor thousands of
// short ones leave it idle, and a draw is never a lock.
//
// workspace:  order int32 [batch_size] | cost int64 [batch_size + 1] | scratch of thread 0, 1, ...
// The kernels are in attention_kernel.h.
#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "ops.h"

namespace bytetx {
namespace {

using cpu::AttentionItem;
using cpu::AttentionKernel;
using cpu::AttentionScratch;
using cpu::kGroupQueries;
using cpu::kMaxTileQueries;

constexpr int64_t kAlign = 64;  // bytes: a cache line, so that threads share none

// In multiply-adds of one of the two products.  An item's own cost is its packing and its loops'
// ends.  A thread's least share is 5 us (bf16) or 15 us (f32) of AVX-512 work: less does not pay
// for waking it.
constexpr int64_t kItemCost = 1 << 14;
constexpr int64_t kMinThreadCost = 1 << 19;
constexpr int64_t kDrawsPerThread = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int64_t scratch_bytes(int32_t head_dim) {
    return aligned(AttentionScratch(head_dim).words() * int64_t{sizeof(float)});
}

void require(bool condition, const char* what, int64_t got) {
    if (condition) return;
    throw std::invalid_argument(std::string("varlen_attention: ") + what + ", got " +
                                std::to_string(got));
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
    require(p.relative_bias == nullptr || p.relative_bias_span >= longest,
            "relative_bias must span the longest sequence, its span", p.relative_bias_span);
}

// The kernel of `isa`, or of the best set below it that has one for this dtype.
AttentionKernel choose_kernel(Isa isa, DType dtype) {
    AttentionKernel kernel = nullptr;
#if defined(__x86_64__)
    if (isa >= Isa::avx512_bf16) kernel = cpu::attention_avx512bf16(dtype);
    if (kernel == nullptr && isa >= Isa::avx512) kernel = cpu::attention_avx512(dtype);
    if (kernel == nullptr && isa >= Isa::avx2) kernel = cpu::attention_avx2(dtype);
#endif
    return kernel == nullptr ? cpu::attention_portable(dtype) : kernel;
}

// The line of items: where each sequence's begin, in units of cost.
class Plan {
  public:
    Plan(const VarlenAttentionParams& p, int num_threads)
        : p_(p),
          order_(static_cast<int32_t*>(p.workspace)),
          cost_(reinterpret_cast<int64_t*>(static_cast<char*>(p.workspace) +
                                           aligned(p.batch_size * int64_t{sizeof(int32_t)}))) {
        sort_by_length();
        // With fewer items than threads can share, cut smaller groups: repacking keys is cheaper
        // than idling.
        while (num_threads > 1 && group_ > kMaxTileQueries && count_items() < 4 * num_threads) {
            group_ /= 2;
        }
        cost_[0] = 0;
        for (int64_t i = 0; i < p.batch_size; ++i) {
            const int64_t seqlen = length(order_[i]);
            cost_[i + 1] = cost_[i] + num_items(seqlen) * item_cost(seqlen);
        }
    }

    int64_t total_cost() const { return cost_[p_.batch_size]; }

    // Calls run(item) for every item that begins in [begin, end) of the line.
    template <typename Run>
    void visit(int64_t begin, int64_t end, Run&& run) const {
        for (int64_t i = find(begin); i < p_.batch_size && cost_[i] < end; ++i) {
            const int64_t seqlen = length(order_[i]);
            const int64_t cost = item_cost(seqlen);
            int64_t index = begin > cost_[i] ? (begin - cost_[i] + cost - 1) / cost : 0;
            for (; index < num_items(seqlen) && cost_[i] + index * cost < end; ++index) {
                run(item(order_[i], seqlen, index));
            }
        }
    }

  private:
    int64_t length(int64_t sequence) const {
        return p_.cu_seqlens[sequence + 1] - p_.cu_seqlens[sequence];
    }
    int64_t num_items(int64_t seqlen) const {
        return p_.num_heads * ((seqlen + group_ - 1) / group_);
    }
    int64_t item_cost(int64_t seqlen) const {
        return (seqlen < group_ ? seqlen : group_) * seqlen * p_.head_dim + kItemCost;
    }
    int64_t count_items() const {
        int64_t count = 0;
        for (int64_t i = 0; i < p_.batch_size; ++i) count += num_items(length(i));
        return count;
    }
    // Heads of one query group follow each other: they read the same rows of q, k and v.
    AttentionItem item(int32_t sequence, int64_t seqlen, int64_t index) const {
        const int64_t first_query = index / p_.num_heads * group_;
        const int64_t rest = seqlen - first_query;
        return {sequence, static_cast<int32_t>(index % p_.num_heads),
                static_cast<int32_t>(first_query),
                static_cast<int32_t>(rest < group_ ? rest : group_)};
    }
    // The sequence that holds place `begin` of the line.
    int64_t find(int64_t begin) const {
        int64_t low = 0;
        for (int64_t high = p_.batch_size; low < high;) {
            const int64_t middle = (low + high) / 2;
            if (cost_[middle + 1] <= begin)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    // Longest power of two first; within one the batch's own order.
    void sort_by_length() {
        int64_t starts[33] = {};
        const auto place = [&](int64_t i) {
            return 32 - std::bit_width(static_cast<uint32_t>(length(i)));
        };
        for (int64_t i = 0; i < p_.batch_size; ++i) ++starts[place(i)];
        int64_t next = 0;
        for (int64_t& start : starts) {
            const int64_t count = start;
            start = next;
            next += count;
        }
        for (int64_t i = 0; i < p_.batch_size; ++i) {
            order_[starts[place(i)]++] = static_cast<int32_t>(i);
        }
    }

    const VarlenAttentionParams& p_;
    int32_t* order_;
    int64_t* cost_;
    int64_t group_ = kGroupQueries;
};

}  // namespace

int64_t varlen_attention_workspace_bytes(int64_t batch_size, int32_t head_dim, int num_threads) {
    return aligned(batch_size * int64_t{sizeof(int32_t)}) +
           aligned((batch_size + 1) * int64_t{sizeof(int64_t)}) +
           (num_threads > 1 ? num_threads : 1) * scratch_bytes(head_dim);
}

void varlen_attention(const VarlenAttentionParams& p, const Launch& launch) {
    check(p, launch.num_threads);
    if (p.batch_size == 0 || p.total_tokens == 0) return;
    const AttentionKernel kernel = choose_kernel(cpu::resolve_isa(launch.isa), p.dtype);
    const Plan plan(p, launch.num_threads);
    const int64_t total = plan.total_cost();
    const int64_t most_threads = launch.num_threads > 1 ? launch.num_threads : 1;
    const int64_t num_threads = std::clamp(total / kMinThreadCost, int64_t{1}, most_threads);
    const int64_t num_draws = num_threads == 1 ? 1 : num_threads * kDrawsPerThread;
    char* scratch = static_cast<char*>(p.workspace) +
                    varlen_attention_workspace_bytes(p.batch_size, p.head_dim, 0) -
                    scratch_bytes(p.head_dim);
    std::atomic<int64_t> next{0};
    // A task is a thread's slot of scratch, not a piece of work: the work is drawn from `next`.
    cpu::parallel_for(
        num_threads, 1, static_cast<int32_t>(num_threads), [&](int64_t slot, int64_t) {
            float* own = reinterpret_cast<float*>(scratch + slot * scratch_bytes(p.head_dim));
            for (int64_t draw; (draw = next.fetch_add(1, std::memory_order_relaxed)) < num_draws;) {
                plan.visit(total * draw / num_draws, total * (draw + 1) / num_draws,
                           [&](const AttentionItem& item) { kernel(p, item, own); });
            }
        });
}

}  // namespace bytetx
