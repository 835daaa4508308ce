// Disentangled attention (DeBERTa): what positions add to the scores of a tile.
//
//   s(i, j) += q[i] . pos_k[b(i - j)] + k[j] . pos_q[b(i - j)]
//
// b grows by 0 or 1 a step, so the buckets of a tile's distances are one run of rows of pos_k and
// pos_q. Products with that run use the score kernel of attention_tile.h; each score then picks
// its two numbers. No table of [queries, buckets] outlives a tile:
//
//   content to position   c [bucket][query lane]        a tile of queries, a block of keys: 1.1
//                                                       times the work of q.k
//   position to content   p [lanes][key][bucket lane]   a tile of queries, kPositionKeys keys: 2
//                                                       times the work of q.k
//
// Source: DeBERTa (arXiv 2006.03654), section 3.1; one run of buckets a tile is our own.
#pragma once

#include <cstdint>

#include "cpu/attention_tile.h"

namespace {

using bytetx::cpu::AttentionInput;
using bytetx::cpu::kKeyBlock;
using bytetx::cpu::kMaxTileQueries;
using bytetx::cpu::kPositionKeys;
using bytetx::cpu::PositionScratch;

// Where the rows of a tile and the keys of a block stand in their sequence.
struct Place {
    int64_t sequence_begin;  // token
    int first_query;         // position within the sequence
    int num_queries;
    int first_key;
    int num_keys;
};

// The buckets of all distances between a tile's queries and a run of keys.
struct BucketRun {
    int first;
    int count;
};

inline BucketRun bucket_run(const int32_t* bucket_of, const Place& at, int first_key,
                            int num_keys) {
    const int first = bucket_of[at.first_query - (first_key + num_keys - 1)];
    return {first, bucket_of[at.first_query + at.num_queries - 1 - first_key] - first + 1};
}

// scores[key][query] += picked(key, query lane, bucket), for num_keys keys from `first` of the
// tile.
template <class Isa, int kVectors, typename Picked>
void add_picked(const Workspace<Isa>& w, const int32_t* bucket_of, const Place& at, int first,
                int num_keys, Picked&& picked) {
    for (int key = first; key < first + num_keys; ++key) {
        const int32_t* buckets = bucket_of + at.first_query - (at.first_key + key);
        float* s = w.scores + key * w.kTile;
        const int num_queries = min_int(at.num_queries, kVectors * Isa::kWidth);
        for (int query = 0; query < num_queries; ++query) {
            s[query] += picked(key, query, buckets[query]);
        }
    }
}

template <class Isa, int kVectors, typename T>
void add_content_to_position(const Workspace<Isa>& w, const PositionScratch& scratch,
                             const KeyRows<T>& pos_k, const int32_t* bucket_of, const float* q,
                             const Place& at) {
    const BucketRun run = bucket_run(bucket_of, at, at.first_key, at.num_keys);
    Workspace<Isa> own = w;
    own.scores = scratch.content_scores;
    own.keys = scratch.rows;
    typename Isa::Vec unused[kVectors];
    for (int v = 0; v < kVectors; ++v) unused[v] = Isa::zero();
    const Operand rows = pack_keys(own, pos_k, run.first, run.count, 1);
    score_block<Isa, kVectors>(own, q, rows, run.count, unused);
    const float* scores = own.scores;
    add_picked<Isa, kVectors>(w, bucket_of, at, 0, at.num_keys, [=](int, int query, int bucket) {
        return scores[(bucket - run.first) * Workspace<Isa>::kTile + query];
    });
}

template <class Isa, int kVectors, typename T>
void add_position_to_content(const Workspace<Isa>& w, const PositionScratch& scratch,
                             const KeyRows<T>& pos_q, const int32_t* bucket_of, const Operand& keys,
                             const Place& at) {
    constexpr int kTile = Workspace<Isa>::kTile;
    typename Isa::Vec unused[Isa::kScoreVectors];
    for (int v = 0; v < Isa::kScoreVectors; ++v) unused[v] = Isa::zero();
    for (int first = 0; first < at.num_keys; first += kPositionKeys) {
        const int num_keys = min_int(kPositionKeys, at.num_keys - first);
        const BucketRun run = bucket_run(bucket_of, at, at.first_key + first, num_keys);
        const Operand own_keys{keys.words + first * keys.stride, keys.stride};
        Workspace<Isa> own = w;
        for (int lane = 0; lane < run.count; lane += kTile) {
            for (int i = 0; i < kTile; i += Isa::kWidth) {
                const int rest = run.count - lane - i;  // below 1: lanes of zeros, nothing is read
                const T* row = pos_q(run.first + (rest > 0 ? lane + i : 0));
                pack_queries<Isa>(w, row, pos_q.stride, rest, scratch.lanes + i);
            }
            own.scores = scratch.position_scores + lane * kPositionKeys;
            score_block<Isa, Isa::kScoreVectors>(own, scratch.lanes, own_keys, num_keys, unused);
        }
        const float* scores = scratch.position_scores;
        add_picked<Isa, kVectors>(w, bucket_of, at, first, num_keys, [=](int key, int, int bucket) {
            const int lane = bucket - run.first;
            const int tile = lane / kTile * kTile;
            return scores[tile * kPositionKeys + (key - first) * kTile + lane % kTile];
        });
    }
}

// Adds both terms to the scores of a tile, and finds their maximum again. scratch: that of
// PositionScratch, behind AttentionScratch.
template <class Isa, int kVectors, typename T>
void add_position_scores(const Workspace<Isa>& w, const AttentionInput& in, int head,
                         float* scratch, const float* q, const Operand& keys, const Place& at,
                         typename Isa::Vec (&maximum)[kVectors]) {
    const PositionScratch own(in.head_dim, scratch);
    const int64_t stride = int64_t{in.num_heads} * in.head_dim;
    const int32_t* bucket_of = in.buckets + in.relative_bias_span - 1;
    const auto rows_of = [&](const void* table) {
        return KeyRows<T>{static_cast<const T*>(table) + int64_t{head} * in.head_dim, stride,
                          nullptr, 0};
    };
    if (in.pos_k != nullptr) {
        add_content_to_position<Isa, kVectors, T>(w, own, rows_of(in.pos_k), bucket_of, q, at);
    }
    if (in.pos_q != nullptr) {
        add_position_to_content<Isa, kVectors, T>(w, own, rows_of(in.pos_q), bucket_of, keys, at);
    }
    for (int v = 0; v < kVectors; ++v) {
        maximum[v] = Isa::set1(-__builtin_inff());
        for (int key = 0; key < at.num_keys; ++key) {
            const float* s = w.scores + key * w.kTile + v * Isa::kWidth;
            maximum[v] = Isa::max(maximum[v], Isa::load(s));
        }
    }
}

}  // namespace
