// State and work of a cluster of CTAs that samples one row: distances and weights of its tokens,
// visits of them in the order of the vocabulary, and sums whose order is the row's own.
#pragma once

#include <cooperative_groups.h>

#include <cmath>
#include <cstdint>

#include "common/launch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx::sampling {

namespace cg = cooperative_groups;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kUnroll = 4;            // vectors of a lane in flight
constexpr int kChunk = 1024;          // tokens that a warp sums in one order, whatever the cluster
constexpr int kMaxChunks = kThreads;  // a thread of the leader has a chunk
constexpr int kBins = 4096;
constexpr int kBinsAThread = kBins / kThreads;
constexpr float kBinsANat = 128.0f;  // tokens 32 nats off, 1e-14 of the largest, are in the last
constexpr int kListSize = 8192;      // tokens around a limit; 64 KB, so that an SM holds two CTAs
constexpr uint32_t kLastKey = 0x7f7fffff;  // largest key of a finite distance
constexpr float kLog2e = 1.4426950408889634f;
constexpr double kFixedOne = 0x1p42;  // weights as integers, whose sums have no order

// exp(-distance) to 2^-22 + distance * 2^-24, relatively.
__device__ __forceinline__ float weight(float distance) {
    float w;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(distance * -kLog2e));
    return w;
}

__device__ __forceinline__ float key_weight(uint32_t key) { return weight(__uint_as_float(key)); }

__device__ __forceinline__ unsigned long long fixed(float w) {
    return static_cast<unsigned long long>(w * static_cast<float>(kFixedOne));
}

// One row. Passes work on a copy; the leader keeps it in shared memory, for registers are few.
struct Row {
    const void* logits;  // T [vocab_size]
    int vocab_size;
    int num_chunks;
    bool has_vecs;  // it and the rows beside it can be read 16 bytes at a time
    float max;      // largest of its logits
    float inverse;  // 1 / temperature

    // From the largest logit, over the temperature: at least 0, inf for a token that is forbidden.
    __device__ float distance(float x) const { return (max - x) * inverse; }

    // Its bits as an integer, which are in the same order.
    __device__ uint32_t key(float x) const { return __float_as_uint(distance(x)); }

    // A vector of a row's end, or of one that lies across 16-byte boundaries.
    template <typename T>
    __device__ uint4 load_slowly(int token) const {
        Vec<T> vec;
#pragma unroll
        for (int e = 0; e < kVecSize<T>; ++e) {
            const bool is_in_row = token + e < vocab_size;
            vec.value[e] =
                is_in_row ? static_cast<const T*>(logits)[token + e] : static_cast<T>(-INFINITY);
        }
        return *reinterpret_cast<const uint4*>(&vec);
    }

    // f(vector, first token) of every vector of a chunk, by one warp; each lane in the vocabulary's
    // order. Beyond the row's end are forbidden tokens. The warp stays together.
    template <typename T, typename F>
    __device__ __forceinline__ void visit_vecs(int chunk, const F& f) const {
        constexpr int kStep = kWarpSize * kVecSize<T>;
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
        const auto* vecs = static_cast<const uint4*>(logits);
        const int end = (chunk + 1) * kChunk;
        int token = chunk * kChunk + lane * kVecSize<T>;
        if (has_vecs && end <= vocab_size) {
#pragma unroll 1
            for (; token < end; token += kUnroll * kStep) {
                uint4 words[kUnroll];
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) {
                    words[u] = load_once(vecs + token / kVecSize<T> + u * kWarpSize);
                }
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) f(words[u], token + u * kStep);
            }
            return;
        }
#pragma unroll 1
        for (; token < end; token += kStep) f(load_slowly<T>(token), token);
    }

    // f(logit, token) of every token of a chunk, likewise.
    template <typename T, typename F>
    __device__ __forceinline__ void visit(int chunk, const F& f) const {
        visit_vecs<T>(chunk, [&](const uint4& words, int token) {
#pragma unroll
            for (int e = 0; e < kVecSize<T>; ++e) f(element<T>(words, e), token + e);
        });
    }

    // body(chunk) for the chunks of this warp, of all those of the cluster.
    template <typename F>
    __device__ __forceinline__ void visit_own(const F& body) const {
        const auto cluster = cg::this_cluster();
        const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int step = static_cast<int>(cluster.num_blocks()) * kWarps;
        for (int c = static_cast<int>(cluster.block_rank()) * kWarps + warp; c < num_chunks;
             c += step) {
            body(c);
        }
    }
};

// One step's command from the cluster's first CTA, the leader, to all.
enum class Op : int { end, gather, histogram };
struct Command {
    Op op;
    uint32_t first;  // key
    uint32_t last;
};

struct ListEntry {
    uint32_t token;
    uint32_t key;
};

struct Shared {
    ListEntry list[kListSize];                 // leader: tokens with keys first ... last
    uint32_t bins[kBins];                      // tokens by distance
    uint32_t fine[kBins];                      // tokens by key, first ... last
    unsigned long long list_mass[kMaxChunks];  // leader: kept tokens of the list
    float chunk_mass[kMaxChunks];              // leader: of tokens with keys below first
    double2 partial[kWarps];
    unsigned long long keys[kWarps];
    unsigned long long cta_key;
    Row row;
    double goal;  // leader: the sum that a limit must reach
    double before;
    double share;
    Command command;
    int list_count;
    int lowest_bin;
    int highest_bin;
    int chunk;
    int last_chunk;
};

__device__ __forceinline__ float warp_sum(float value) { return row_sum<kWarpSize>(value); }

// Sums of the values of all threads before this one, and of all; every thread of the CTA calls it.
struct Scan {
    double2 before;
    double2 all;
};

__device__ inline Scan cta_scan(Shared& s, double2 value) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    double2 sum = value;
#pragma unroll
    for (int by = 1; by < kWarpSize; by *= 2) {
        const double x = __shfl_up_sync(~0u, sum.x, by), y = __shfl_up_sync(~0u, sum.y, by);
        if (lane >= by) sum = {sum.x + x, sum.y + y};
    }
    __syncthreads();  // pairs with the reads of the cta_scan before this one
    if (lane == kWarpSize - 1) s.partial[warp] = sum;
    double x = __shfl_up_sync(~0u, sum.x, 1), y = __shfl_up_sync(~0u, sum.y, 1);
    if (lane == 0) x = y = 0.0;
    __syncthreads();  // every warp's sum is written
    double2 before{}, all{};
#pragma unroll 4
    for (int i = 0; i < kWarps; ++i) {
        if (i == warp) before = all;
        all = {all.x + s.partial[i].x, all.y + s.partial[i].y};
    }
    return {{before.x + x, before.y + y}, all};
}

// Number `position` of the stream of `seed`, in [0, 1): ops/sampling.py's uniform().
__device__ inline double uniform(int64_t seed, int64_t position) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
    const auto mix = [](uint64_t x) {
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
        x = (x ^ x >> 27) * 0x94D049BB133111EB;
        return x ^ x >> 31;
    };
    const uint64_t start = mix(static_cast<uint64_t>(seed) + kGolden);
    return static_cast<double>(mix(start + (static_cast<uint64_t>(position) + 1) * kGolden) >> 12) *
           0x1p-52;
}

}  // namespace bytetx::sampling
