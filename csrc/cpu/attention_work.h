// Items of the tile kernel, as the attention launchers count them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention.h"
#include "cpu/work_queue.h"

namespace bytetx::cpu {

// A head of a sequence and up to `group` of its query rows is an item.  Heads of one query group
// follow each other: they read the same rows of q, k and v.
struct TileWork {
    const AttentionInput& in;
    int64_t group = kGroupQueries;

    int64_t num_items(int64_t num_queries) const {
        return in.num_heads * ((num_queries + group - 1) / group);
    }
    // Each item of a causal sequence counts as its mean one.
    SequenceWork operator()(int64_t sequence) const {
        const int64_t num_queries = in.num_queries(sequence);
        int64_t num_keys = in.num_keys(sequence);
        if (in.causal) num_keys -= num_queries / 2;
        if (in.window > 0) {
            const int64_t seen = in.causal ? in.window : 2 * int64_t{in.window};
            num_keys = std::min(num_keys, seen + group / 2);
        }
        return {num_items(num_queries),
                std::min(num_queries, group) * num_keys * in.head_dim + kItemCost};
    }
    AttentionItem item(int32_t sequence, int64_t index) const {
        const int64_t first_query = index / in.num_heads * group;
        const int64_t rest = in.num_queries(sequence) - first_query;
        return {sequence, static_cast<int32_t>(index % in.num_heads),
                static_cast<int32_t>(first_query), static_cast<int32_t>(std::min(rest, group))};
    }
    // With fewer items than threads can share, smaller groups: repacking keys is cheaper than
    // idling.
    void cut(int64_t num_items, int num_threads) {
        while (num_threads > 1 && group > kMaxTileQueries && num_items < 4 * num_threads) {
            group /= 2;
            num_items *= 2;
        }
    }
};

inline int64_t scratch_bytes(int32_t head_dim) {
    return aligned(AttentionScratch(head_dim).words() * int64_t{sizeof(float)});
}

}  // namespace bytetx::cpu
