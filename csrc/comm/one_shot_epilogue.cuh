// The epilogue of gemm_all_reduce's GEMM for small m, with its scheduler and its producer: it sends
// tiles to the staging buffers of all ranks or, with two exchanges, of the owner of the rows.
//
// The GEMM is bound by its weights, so they are the 64 rows of a wgmma and the tokens its
// columns: 16 tokens are 16 columns, not 64 rows that are mostly padding. A CTA streams 64 or 128
// rows of weights through a ring as deep as an SM's share of shared memory. The CTAs of a cluster
// split k and add their sums through distributed shared memory, where they are transposed as well.
// Each CTA stores its part of the sums into this rank's place in the staging buffers.
#pragma once

#include "comm/peers.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/producers.cuh"

namespace bytetx::gemm {

// A tiling's kRowBlocks are of 64 rows of weights, its kTileN is of tokens. The problem's a: the
// rows of tokens, its b: weights in their own order.
struct OneShotInputs {
    const void* partial;  // [m, n], or null for none
    comm::Peers peers;
    int rows_of_owner;  // two exchanges: rows that each rank sums; one exchange: 0
};

struct OneShotSmem {
    uint32_t epoch;
};

// As SplitKScheduler, with tokens for columns. Nobody reaches another CTA before its sums are
// there.
template <typename C>
struct OneShotScheduler : SplitKCta<C> {
    static constexpr bool kProducerReturns = false;

    __device__ __forceinline__ OneShotScheduler(const Problem& p,
                                                const typename SplitKCta<C>::Inputs&)
        : SplitKCta<C>(p) {
        this->m = this->cluster / p.tiles_n * C::kTileN;
        this->n = this->cluster % p.tiles_n * C::kTileM;
    }

    __device__ __forceinline__ void sync_start() const { __syncthreads(); }
    // No CTA reads this one's sums any more.
    __device__ __forceinline__ void sync_end() const {
        arrive_in_cluster();
        wait_for_cluster();
    }
    __device__ __forceinline__ void end_producer() const {}
};

// Every CTA has stored its sums.
__device__ __forceinline__ void meet_with_sums() {
    __syncwarp();
    arrive_in_cluster();
    wait_for_cluster();
}

// The sums of a token are contiguous; the pitch avoids bank conflicts of a quad's stores.
template <typename C>
constexpr int kSumPitch = C::kTileM + 4;

template <typename C>
__device__ __forceinline__ float* sums_of(StaticStages<C>& stages, int token) {
    return reinterpret_cast<float*>(stages.a(0)) + token * kSumPitch<C>;
}

template <typename C>
__device__ __forceinline__ void store_transposed(StaticStages<C>& stages,
                                                 const typename C::Accumulators& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    sync_threads_of(kWarpgroupThreads, 0);  // the ring is read
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < C::kTileN / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = 8 * i + lane % 4 * 2 + e % 2;
                sums_of(stages, token)[64 * r + 16 * warp + lane / 4 + e / 2 * 8] =
                    sums(r * (C::kTileN / 2) + 4 * i + e);
            }
        }
    }
}

// Eight sums of a token over the cluster's CTAs, in the order of their ranks.
__device__ __forceinline__ void add_eight(const float* at, int num_ranks, float (&sum)[8]) {
    const uint32_t local = smem_address(at);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = 0.0f;
    for (int from = 0; from < num_ranks; ++from) {
        uint32_t remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(from));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float4 part;
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                         : "r"(remote + 16 * i)
                         : "memory");
            sum[4 * i] += part.x;
            sum[4 * i + 1] += part.y;
            sum[4 * i + 2] += part.z;
            sum[4 * i + 3] += part.w;
        }
    }
}

// The number of this call, once all ranks' staging buffers are free for it. Called by the fetching
// warp while its last loads are in flight; one lane has waited for the prior kernels.
__device__ __forceinline__ uint32_t find_epoch(const comm::Peers& peers) {
    uint32_t epoch = 0;
    if (threadIdx.x % 32 == 0) epoch = comm::this_epoch(peers, comm::kSumEpoch);
    epoch = __shfl_sync(0xffffffffu, epoch, 0);
    comm::wait_for_slots(peers, epoch);
    return epoch;
}

// Sends eight features of a row, `within` elements from the product's first, to all ranks or to the
// row's owner. Staging buffers hold [size, m, n], or the parts of the owner's rows (two_shot.cu).
__device__ __forceinline__ void send_eight(const Problem& p, const OneShotInputs& in,
                                           uint32_t epoch, int row, int64_t within,
                                           const uint4& words) {
    const comm::Peers& peers = in.peers;
    if (in.rows_of_owner != 0) {
        const int owner = row / in.rows_of_owner;
        const int64_t skipped = int64_t{peers.rank - owner} * in.rows_of_owner * p.n;
        comm::store_relaxed(comm::staging_at(peers, owner, epoch) + (skipped + within) / 8, words);
        return;
    }
    const int64_t place = (int64_t{peers.rank} * p.m * p.n + within) / 8;
    for (int peer = 0; peer < peers.size; ++peer) {
        comm::store_relaxed(comm::staging_at(peers, peer, epoch) + place, words);
    }
}

// Sends this CTA's part of the tile.
template <typename C>
__device__ __forceinline__ void send_part(const Problem& p, const OneShotInputs& in,
                                          StaticStages<C>& stages, uint32_t epoch, int first_token,
                                          int first_column, int rank, int num_ranks) {
    using T = typename C::Element;
    constexpr int kGroups = C::kTileM / 8;
    for (int v = rank * kWarpgroupThreads + static_cast<int>(threadIdx.x); v < C::kTileN * kGroups;
         v += num_ranks * kWarpgroupThreads) {
        const int token = v / kGroups, group = v % kGroups;
        const int column = first_column + group * 8;
        if (first_token + token >= p.m || column >= p.n) continue;
        float x[8];
        add_eight(sums_of(stages, token) + group * 8, num_ranks, x);
        const int64_t within = int64_t{first_token + token} * p.n + column;
        uint32_t words[4];
        if (in.partial != nullptr) {
            const uint4 eight =
                __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(in.partial) + within));
            const uint32_t parts[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const float2 pair = unpack(parts[e / 2], T{});
                x[e] += pair.x;
                x[e + 1] += pair.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = comm::never_zero(pack(x[2 * i], x[2 * i + 1], T{}));
        }
        const auto eight = make_uint4(words[0], words[1], words[2], words[3]);
        send_eight(p, in, epoch, first_token + token, within, eight);
    }
}

// One warp: fetches, as many weights as the ring holds before the kernel before has ended; finds
// the number of the call while the last fetches are under way.
template <typename C>
struct OneShotProducer : ProducerDefaults {
    using Smem = OneShotSmem;

    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int lane) {
        auto& [p, s, at] = k;
        const comm::Peers& peers = p.epilogue.peers;
        const auto once = L2Policy::evict_first;
        const auto often = L2Policy::evict_last;
        const auto weights = [&](int stage, int feature, int n) {
            load_box(&p.b, &s.ring.full[stage], once, s.stages.a(stage), feature, n);
        };
        const auto tokens = [&](int stage, int feature, int m) {
            load_box(&p.a, &s.ring.full[stage], often, s.stages.b(stage), feature, m);
        };
        if (lane == 0) fetch_operands<C>(k, weights, tokens, [](int, int) {});
        __syncwarp();
        const uint32_t found = find_epoch(peers);
        if (lane == 0) s.producer.epoch = found;
        meet_with_sums();
        if (blockIdx.x == 0 && lane == 0) comm::begin_sum(peers, found);
    }
};

template <typename C>
struct OneShotEpilogue : EpilogueDefaults {
    using Inputs = OneShotInputs;
    // The next kernel relies on all kernels before this one having ended.
    static constexpr bool kReleasesLate = true;
    const Problem& p;
    const Inputs& in;
    StaticStages<C>& stages;  // sums take their place when all have been read
    const OneShotSmem& call;
    int m, n, rank, num_ranks;

    template <typename K>
    __device__ __forceinline__ OneShotEpilogue(const K& k, int m, int n, int)
        : p(k.p),
          in(k.p.epilogue),
          stages(k.s.stages),
          call(k.s.producer),
          m(m),
          n(n),
          rank(k.at.rank),
          num_ranks(k.at.num_ranks) {
        static_assert(sizeof(StaticStages<C>) >= C::kTileN * kSumPitch<C> * sizeof(float));
    }

    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        wait();
        sums.clear();
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(const Accumulators& sums) const {
        store_transposed<C>(stages, sums);
        meet_with_sums();
        send_part<C>(p, in, stages, call.epoch, m, n, rank, num_ranks);
    }
};

}  // namespace bytetx::gemm
