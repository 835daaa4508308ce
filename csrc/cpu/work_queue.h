// A queue of the work items of many sequences, which threads take in pieces of about equal cost.
//
// All items of a sequence have the same cost. Sequences are sorted by their cost, rounded to a
// power of two, the most expensive first. A free thread takes the next piece with one atomic
// addition, so neither one long sequence nor thousands of short ones leave threads idle, and there
// is no lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "cpu/parallel.h"

namespace bytetx::cpu {

constexpr int64_t kCacheLine = 64;  // bytes; threads share none

inline int64_t aligned(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// Costs are in multiply-adds of one of attention's two products. An item's fixed cost is its
// packing and its loop overhead. A thread gets at least 5 us (bf16) or 15 us (f32) of AVX-512 work:
// less does not pay for waking it.
constexpr int64_t kItemCost = 1 << 14;
constexpr int64_t kMinThreadCost = 1 << 19;
constexpr int64_t kDrawsPerThread = 16;

struct SequenceWork {
    int64_t num_items;
    int64_t item_cost;
};

// `work(sequence)` is a SequenceWork.  workspace:  order int32 [batch_size] | cost int64
// [batch_size + 1].
template <typename Work>
class WorkQueue {
  public:
    static int64_t workspace_bytes(int64_t batch_size) {
        return aligned(batch_size * int64_t{sizeof(int32_t)}) +
               aligned((batch_size + 1) * int64_t{sizeof(int64_t)});
    }

    WorkQueue(int64_t batch_size, void* workspace, const Work& work)
        : batch_size_(batch_size),
          work_(work),
          order_(static_cast<int32_t*>(workspace)),
          cost_(reinterpret_cast<int64_t*>(static_cast<char*>(workspace) +
                                           aligned(batch_size * int64_t{sizeof(int32_t)}))) {
        sort_by_cost();
        cost_[0] = 0;
        for (int64_t i = 0; i < batch_size; ++i) cost_[i + 1] = cost_[i] + whole_cost(order_[i]);
    }

    // Calls run(sequence, index of item, scratch) for every item, on up to most_threads threads;
    // each has scratch_bytes of `scratch` for its own.
    template <typename Run>
    void run(int most_threads, char* scratch, int64_t scratch_bytes, Run&& run) const {
        const int64_t total = cost_[batch_size_];
        const int64_t num_threads =
            std::clamp(total / kMinThreadCost, int64_t{1}, int64_t{std::max(most_threads, 1)});
        const int64_t num_draws = num_threads == 1 ? 1 : num_threads * kDrawsPerThread;
        std::atomic<int64_t> next{0};
        // A task is a thread's slot of scratch, not a piece of work: the work is drawn from `next`.
        parallel_for(num_threads, 1, static_cast<int32_t>(num_threads), [&](int64_t slot, int64_t) {
            float* own = reinterpret_cast<float*>(scratch + slot * scratch_bytes);
            const auto draw = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
            for (int64_t i; (i = draw()) < num_draws;) run_draw(i, num_draws, own, run);
        });
    }

    // Calls run(sequence, index of item, own) for the items of one of num_draws pieces.
    template <typename Run>
    void run_draw(int64_t draw, int64_t num_draws, float* own, Run&& run) const {
        const int64_t total = cost_[batch_size_];
        visit(total * draw / num_draws, total * (draw + 1) / num_draws,
              [&](int32_t sequence, int64_t index) { run(sequence, index, own); });
    }

  private:
    int64_t whole_cost(int64_t sequence) const {
        const SequenceWork work = work_(sequence);
        return work.num_items * work.item_cost;
    }
    // Calls run(sequence, index) for every item that begins in [begin, end) of the queue's cost.
    template <typename Run>
    void visit(int64_t begin, int64_t end, Run&& run) const {
        for (int64_t i = find(begin); i < batch_size_ && cost_[i] < end; ++i) {
            const SequenceWork work = work_(order_[i]);
            const int64_t cost = work.item_cost;
            int64_t index = begin > cost_[i] ? (begin - cost_[i] + cost - 1) / cost : 0;
            for (; index < work.num_items && cost_[i] + index * cost < end; ++index) {
                run(order_[i], index);
            }
        }
    }
    // The sequence that contains position `begin` of the queue's cost.
    int64_t find(int64_t begin) const {
        return std::upper_bound(cost_ + 1, cost_ + batch_size_ + 1, begin) - (cost_ + 1);
    }
    // Sequences of the same power of two stay in the order of the batch.
    void sort_by_cost() {
        int64_t starts[65] = {};
        const auto place = [&](int64_t i) {
            return 64 - std::bit_width(static_cast<uint64_t>(whole_cost(i)));
        };
        for (int64_t i = 0; i < batch_size_; ++i) ++starts[place(i)];
        int64_t next = 0;
        for (int64_t& start : starts) {
            const int64_t count = start;
            start = next;
            next += count;
        }
        for (int64_t i = 0; i < batch_size_; ++i) {
            order_[starts[place(i)]++] = static_cast<int32_t>(i);
        }
    }

    int64_t batch_size_;
    const Work& work_;
    int32_t* order_;
    int64_t* cost_;
};

}  // namespace bytetx::cpu
