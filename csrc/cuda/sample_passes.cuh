// The passes over a row of logits that cuda/sample.cu makes, by all CTAs of its cluster.
#pragma once

#include "cuda/sample_row.cuh"

namespace bytetx::sampling {

using Key = unsigned long long;

__device__ inline Key warp_max(Key key) {
    for (int by = kWarpSize / 2; by > 0; by /= 2) {
        const Key other = __shfl_xor_sync(~0u, key, by);
        key = other > key ? other : key;
    }
    return key;
}

// The largest logit of the row above its inverted place, so that of equal ones the first wins; NaN
// is above all. Every thread of the cluster gets it.
template <typename T>
__device__ Key find_largest(const Row& row, Shared& s) {
    const auto cluster = cg::this_cluster();
    float best = -INFINITY;
    int place = 0;
    bool has_nan = false;
    row.visit_own([&](int chunk) {
        row.visit<T>(chunk, [&](float x, int token) {
            if (x > best) {
                best = x;
                place = token;
            }
            has_nan |= x != x;
        });
    });
    const uint32_t bits = __float_as_uint(best + 0.0f);  // -0 is 0
    const uint32_t ordered = has_nan ? ~0u : bits ^ (bits >> 31 ? ~0u : 1u << 31);
    const Key key = warp_max(static_cast<Key>(ordered) << 32 | ~static_cast<uint32_t>(place));
    const unsigned lane = threadIdx.x % kWarpSize;
    if (lane == 0) s.keys[threadIdx.x / kWarpSize] = key;
    __syncthreads();
    const Key of_cta = warp_max(s.keys[lane % kWarps]);
    if (threadIdx.x == 0) s.cta_key = of_cta;
    cluster.sync();  // pairs with the reads of every cta_key
    return warp_max(*cluster.map_shared_rank(&s.cta_key, lane % cluster.num_blocks()));
}

struct Largest {
    float value;
    int token;  // -1 where the value is not finite
};

__device__ inline Largest largest_of(Key key) {
    const auto ordered = static_cast<uint32_t>(key >> 32);
    const float value = __uint_as_float(ordered ^ (ordered >> 31 ? 1u << 31 : ~0u));
    const bool is_finite = ordered != ~0u && isfinite(value);
    return {value, is_finite ? static_cast<int>(~static_cast<uint32_t>(key)) : -1};
}

// Pass 2: the weights of chunks to the leader; tokens by distance where limits need them. Not
// inlined, or what the leader keeps in registers later spills.
template <typename T, bool kCounts>
__device__ __noinline__ void measure(Shared& s) {
    const Row row = s.row;
    const auto cluster = cg::this_cluster();
    auto* leader = cluster.map_shared_rank(&s, 0);
    uint32_t num_far = 0;
    row.visit_own([&](int chunk) {
        float mass = 0.0f;
        row.visit<T>(chunk, [&](float x, int) {
            const float distance = row.distance(x);
            mass += weight(distance);
            if constexpr (kCounts) {
                // The sum's low bits are rint(distance * kBinsANat); it grows with the distance.
                const uint32_t bin =
                    __float_as_uint(fmaf(distance, kBinsANat, 0x1p23f)) - 0x4b000000u;
                const bool is_far = bin >= kBins - 1;
                num_far += is_far && distance < INFINITY;
                if (!is_far) atomicAdd(&s.bins[bin], 1u);
            }
        });
        mass = warp_sum(mass);
        if (threadIdx.x % kWarpSize == 0) leader->chunk_mass[chunk] = mass;
    });
    if constexpr (kCounts) {
        num_far = __reduce_add_sync(~0u, num_far);
        if (threadIdx.x % kWarpSize == 0 && num_far > 0) atomicAdd(&s.bins[kBins - 1], num_far);
    }
}

// Pass 3: the weights of chunks below the range, and the list of what lies in it, to the leader.
template <typename T>
__device__ void gather(const Command& command, Shared& s) {
    const Row row = s.row;
    const auto cluster = cg::this_cluster();
    auto* leader = cluster.map_shared_rank(&s, 0);
    const unsigned lane = threadIdx.x % kWarpSize;
    row.visit_own([&](int chunk) {
        float mass = 0.0f;
        row.visit<T>(chunk, [&](float x, int token) {
            const float distance = row.distance(x);
            const uint32_t key = __float_as_uint(distance);
            const float w = weight(distance);
            if (key < command.first) mass += w;
            const bool is_listed = key >= command.first && key <= command.last;
            const unsigned listed = __ballot_sync(~0u, is_listed);
            if (listed == 0) return;
            int place = 0;
            if (lane == 0) place = atomicAdd(&leader->list_count, __popc(listed));
            place = __shfl_sync(~0u, place, 0) + __popc(listed & ((1u << lane) - 1));
            if (is_listed && place < kListSize) {
                leader->list[place] = {static_cast<uint32_t>(token), key};
            }
        });
        mass = warp_sum(mass);
        if (lane == 0) leader->chunk_mass[chunk] = mass;
    });
}

__device__ inline int fine_shift(const Command& range) {
    return max(32 - __clz(static_cast<int>(range.last - range.first)) - 12, 0);  // 12 bits: kBins
}

__device__ inline void clear(uint32_t (&bins)[kBins]) {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
}

// Tokens of the range by key.
template <typename T>
__device__ void count_fine(const Command& range, Shared& s) {
    const Row row = s.row;
    clear(s.fine);
    const int shift = fine_shift(range);
    row.visit_own([&](int chunk) {
        row.visit<T>(chunk, [&](float x, int) {
            const uint32_t key = row.key(x);
            if (key >= range.first && key <= range.last) {
                atomicAdd(&s.fine[(key - range.first) >> shift], 1u);
            }
        });
    });
}

template <typename T>
__device__ void run(const Command& command, Shared& s) {
    if (command.op == Op::gather) return gather<T>(command, s);
    count_fine<T>(command, s);
}

// Runs the leader's commands in the CTAs that do not lead.
template <typename T>
__device__ void follow(Shared& s) {
    const auto cluster = cg::this_cluster();
    while (true) {
        cluster.sync();  // pairs with issue()
        const Command command = s.command;
        if (command.op == Op::end) return;
        run<T>(command, s);
        cluster.sync();
    }
}

}  // namespace bytetx::sampling
