// The GEMM kernel of gemm_all_reduce for small m: it sends its tiles to the staging buffers of all
// ranks or, with two exchanges, of the owner of the rows.
//
// The kernel is bound by its weights, so they are the 64 rows of a wgmma and the tokens its
// columns: 16 tokens are 16 columns, not 64 rows that are mostly padding. A CTA streams 64 or 128
// rows of weights through a ring as deep as an SM's share of shared memory. The CTAs of a cluster
// split k and add their sums through distributed shared memory, where they are transposed as well.
// Each CTA stores its part of the sums into this rank's place in the staging buffers.
#pragma once

#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx::gemm {

// A tiling's kRowBlocks are of 64 rows of weights, its kTileN is of tokens.
struct OneShotParams {
    CUtensorMap weights;  // {k, n}
    CUtensorMap x;        // {k, m}
    const void* partial;  // [m, n], or null for none
    comm::Peers peers;
    int m, n;
    int num_k_blocks;
    int tiles_n;        // of weights
    int rows_of_owner;  // two exchanges: rows that each rank sums; one exchange: 0
};

template <typename C>
struct OneShotSmem : Smem<C> {
    uint32_t epoch;
};

template <typename C>
__device__ __forceinline__ void init_ring(Smem<C>& s) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.full[i], 1);
            EmptyBarrier::init(&s.empty[i], 4);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
}

// One thread. Loads as many blocks of weights as the ring holds, waits for the prior kernel, then
// loads the rest.
template <typename C>
__device__ __forceinline__ void fetch_operands(const OneShotParams& p, Smem<C>& s, Share share,
                                               int token, int column) {
    const auto once = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    const auto often = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    const auto fetch_weights = [&](int stage, int block) {
        FullBarrier::arrive_and_expect_tx(&s.full[stage], C::kStageBytes);
        cute::SM90_TMA_LOAD_2D::copy(&p.weights, &s.full[stage], once, s.a[stage], block * kBlockK,
                                     column);
    };
    const int early = min(C::kStages, share.end - share.begin);
    for (int i = 0; i < early; ++i) fetch_weights(i, share.begin + i);
    wait_for_prior_kernel();
    RingIndex<C::kStages> ring;
    for (int block = share.begin; block < share.end; ++block, ring.advance()) {
        if (block - share.begin >= early) {
            EmptyBarrier::wait(&s.empty[ring.index], ring.phase ^ 1);  // pairs with multiply()
            fetch_weights(ring.index, block);
        }
        cute::SM90_TMA_LOAD_2D::copy(&p.x, &s.full[ring.index], often, s.b[ring.index],
                                     block * kBlockK, token);
    }
}

// The sums of a token are contiguous; the pitch avoids bank conflicts of a quad's stores.
template <typename C>
constexpr int kSumPitch = C::kTileM + 4;

template <typename C>
__device__ __forceinline__ float* sums_of(Smem<C>& s, int token) {
    return reinterpret_cast<float*>(s.a[0]) + token * kSumPitch<C>;
}

template <typename C>
__device__ __forceinline__ void store_transposed(Smem<C>& s, const typename C::Accumulators& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    cutlass::arch::NamedBarrier::arrive_and_wait(kWarpgroupThreads, 0);  // the ring is read
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < C::kTileN / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = 8 * i + lane % 4 * 2 + e % 2;
                sums_of(s, token)[64 * r + 16 * warp + lane / 4 + e / 2 * 8] =
                    sums(r * (C::kTileN / 2) + 4 * i + e);
            }
        }
    }
}

// Eight sums of a token over the cluster's CTAs, in the order of their ranks.
__device__ __forceinline__ void add_eight(const float* at, int num_ranks, float (&sum)[8]) {
    const uint32_t local = cute::cast_smem_ptr_to_uint(at);
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
__device__ __forceinline__ void send_eight(const OneShotParams& p, uint32_t epoch, int row,
                                           int64_t within, const uint4& words) {
    const comm::Peers& peers = p.peers;
    if (p.rows_of_owner != 0) {
        const int owner = row / p.rows_of_owner;
        const int64_t skipped = int64_t{peers.rank - owner} * p.rows_of_owner * p.n;
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
__device__ __forceinline__ void send_part(const OneShotParams& p, Smem<C>& s, uint32_t epoch,
                                          int first_token, int first_column, int rank,
                                          int num_ranks) {
    using T = typename C::Element;
    constexpr int kGroups = C::kTileM / 8;
    for (int v = rank * kWarpgroupThreads + static_cast<int>(threadIdx.x); v < C::kTileN * kGroups;
         v += num_ranks * kWarpgroupThreads) {
        const int token = v / kGroups, group = v % kGroups;
        const int column = first_column + group * 8;
        if (first_token + token >= p.m || column >= p.n) continue;
        float x[8];
        add_eight(sums_of(s, token) + group * 8, num_ranks, x);
        const int64_t within = int64_t{first_token + token} * p.n + column;
        uint32_t words[4];
        if (p.partial != nullptr) {
            const uint4 eight =
                __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(p.partial) + within));
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
        send_eight(p, epoch, first_token + token, within, eight);
    }
}

// Puts this CTA's share of the sums into shared memory.
template <typename C>
__device__ __forceinline__ void sum_share(Smem<C>& s, Share share) {
    typename C::Accumulators sums;
#pragma unroll
    for (int i = 0; i < cute::size(sums); ++i) sums(i) = 0.0f;
    RingIndex<C::kStages> ring;
    const auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&s.empty[stage]);
    };
    multiply(s, share.end - share.begin, ring, sums, release, [] {});
    store_transposed(s, sums);
}

template <typename C>
__global__ void __launch_bounds__(C::Tile::kThreads)
    gemm_one_shot_kernel(const __grid_constant__ OneShotParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<OneShotSmem<C>*>(smem);
    static_assert(sizeof(s.a) + sizeof(s.b) >= C::kTileN * kSumPitch<C> * sizeof(float));
    const int rank = static_cast<int>(cute::block_rank_in_cluster());
    const int num_ranks = static_cast<int>(cute::cluster_shape().x);
    const int tile = static_cast<int>(blockIdx.x) / num_ranks;
    const int token = tile / p.tiles_n * C::kTileN, column = tile % p.tiles_n * C::kTileM;
    const Share share = share_of(p.num_k_blocks, rank, num_ranks);
    init_ring<C>(s);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool is_fetcher = uniform(static_cast<int>(threadIdx.x) / 32) == 4;
    if (is_fetcher) {
        if (lane == 0) fetch_operands<C>(p, s, share, token, column);
        __syncwarp();
        const uint32_t found = find_epoch(p.peers);
        if (lane == 0) s.epoch = found;
    } else {
        wait_for_prior_kernel();
        // Not earlier: the next kernel relies on all kernels before this one having ended.
        release_next_kernel();
        sum_share<C>(s, share);
    }
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();  // every CTA has stored its sums
    if (!is_fetcher) {
        send_part<C>(p, s, s.epoch, token, column, rank, num_ranks);
    } else if (blockIdx.x == 0 && lane == 0) {
        comm::begin_sum(p.peers, s.epoch);
    }
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();  // no CTA reads this one's sums any more
}

template <typename C>
OneShotParams make_one_shot_params(const GemmSumParams& o) {
    const LinearParams& l = o.linear;
    const cuuint64_t sizes[2] = {cuuint64_t(l.k), cuuint64_t(l.n)};
    const cuuint64_t strides[1] = {cuuint64_t(l.k) * kElementBytes};
    const cuuint32_t box[2] = {kBlockK, C::kTileM};
    OneShotParams p{};
    p.weights = encode_map(l, l.b, 2, sizes, strides, box);
    p.x = make_a_map(l, C::kTileN);
    p.partial = l.residual;
    p.peers = comm::make_peers(o.peers);
    p.m = static_cast<int>(l.m);
    p.n = static_cast<int>(l.n);
    p.num_k_blocks = static_cast<int>((l.k + kBlockK - 1) / kBlockK);
    p.tiles_n = (p.n + C::kTileM - 1) / C::kTileM;
    if (o.is_two_shot) p.rows_of_owner = static_cast<int>(comm::rows_of_owner(l.m, o.peers.size));
    return p;
}

template <typename C>
void launch_one_shot(const GemmSumParams& o, cudaStream_t stream) {
    constexpr int kSmemBytes = sizeof(OneShotSmem<C>);
    static_assert(kSmemBytes <= 227 * 1024);
    const OneShotParams p = make_one_shot_params<C>(o);
    const auto kernel = gemm_one_shot_kernel<C>;
    allow_smem(kernel, kSmemBytes);
    const int split_k = std::min(std::max(o.linear.split_k, 1), p.num_k_blocks);
    const int tiles_m = (p.m + C::kTileN - 1) / C::kTileN;
    launch_kernel(
        kernel,
        {dim3(tiles_m * p.tiles_n * split_k), dim3(C::Tile::kThreads), kSmemBytes, stream, split_k},
        p);
    if (o.is_two_shot) return comm::launch_two_shot(o, nullptr, stream);
    comm::launch_sum_staging(o, nullptr, stream);
}

// The body of a tiling's launcher.
template <typename Tile>
void launch_one_shot_tiling(const GemmSumParams& o, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) {
        return launch_one_shot<Config<cutlass::half_t, Tile>>(o, stream);
    }
    launch_one_shot<Config<cutlass::bfloat16_t, Tile>>(o, stream);
}

}  // namespace bytetx::gemm
