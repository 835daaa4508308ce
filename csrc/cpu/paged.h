// Attention over keys in pages, as the operation runs it and as the layers of a decode step do.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cache_ops.h"
#include "cpu/attention.h"
#include "cpu/attention_work.h"
#include "cpu/parallel.h"

namespace bytetx::cpu {

// The first key that a row of this step sees.
inline int32_t first_key(const AttentionInput& in, int64_t sequence) {
    const int32_t first_query = in.num_keys(sequence) - in.num_queries(sequence);
    return in.window > 0 ? std::max(0, first_query - in.window + 1) : 0;
}

// One key costs a decode item its reading: as much as this many multiply-adds a feature.
constexpr int64_t kReadCost = 16;

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
        return {num_items(sequence), keys_an_item * kv_heads * in.head_dim * kReadCost + kItemCost};
    }
    // As large items as still keep the threads busy: rows of k and v hold all heads.
    void cut(int64_t batch_size, int num_threads) {
        const auto count = [&] {
            int64_t num_items = 0;
            for (int64_t i = 0; i < batch_size; ++i) num_items += this->num_items(i);
            return num_items;
        };
        kv_heads = std::min(in.num_kv_heads, kGroupQueries / (in.num_heads / in.num_kv_heads));
        while (num_threads > 1 && kv_heads > 1 && count() < 4 * num_threads) {
            kv_heads = (kv_heads + 1) / 2;
        }
        tiles.cut(count(), num_threads);
    }
    // Words of all heads in all runs, where there are partial results.
    int64_t partial_words(int64_t sequence) const {
        if (!is_decode(sequence) || num_runs(sequence) <= 1) return 0;
        return int64_t{in.num_heads} * num_runs(sequence) * decode_partial_words(in.head_dim);
    }
};

// Where the parts of the workspace begin, in bytes.
struct PagedLayout {
    int64_t first_partials;
    int64_t ended;
    int64_t partials;
    int64_t scratch;
    int64_t end;

    PagedLayout(const PagedWork& work, int64_t batch_size, int num_threads) {
        int64_t partial_words = 0;
        for (int64_t i = 0; i < batch_size; ++i) partial_words += work.partial_words(i);
        const int64_t num_counters = batch_size * work.in.num_kv_heads;
        first_partials = WorkQueue<PagedWork>::workspace_bytes(batch_size);
        ended = first_partials + aligned(batch_size * int64_t{sizeof(int64_t)});
        partials = ended + aligned(num_counters * int64_t{sizeof(int32_t)});
        scratch = partials + aligned(partial_words * int64_t{sizeof(float)});
        end = scratch + std::max(num_threads, 1) * scratch_bytes(work.in.head_dim);
    }
};

// The attention of one call, which layers of the same lengths and window share: they differ in keys
// and values alone.
class PagedAttention {
  public:
    // Throws std::invalid_argument where p is not what it says.
    PagedAttention(const PagedAttentionParams& p, const Launch& launch);
    PagedAttention(const PagedAttention&) = delete;

    static int64_t workspace_bytes(const PagedAttentionParams& p, int num_threads);

    void run(int num_threads);

    // One layer's, of other keys and values; all threads of a team call it.
    void run_layer(Team& team, int32_t thread, const void* k_cache, const void* v_cache,
                   float softmax_scale);

  private:
    void run_item(const AttentionInput& in, int32_t sequence, int64_t index, float* own) const;
    void decode(const AttentionInput& in, int32_t sequence, int64_t index, float* own) const;

    AttentionInput in_;
    AttentionKernels kernels_;
    PagedWork work_;
    PagedLayout layout_;
    WorkQueue<PagedWork> queue_;
    int64_t batch_size_;
    char* workspace_;
    int64_t* first_partials_;
    int32_t* ended_;
    float* partials_;
};

}  // namespace bytetx::cpu
