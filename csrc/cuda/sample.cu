// A token of each row of logits, drawn among those that the row's limits keep.
//
//   d = (max - logits) / temperature;  w = exp(-d)
//   kept: d <= the top_k-th smallest, and w >= min_p, and the sum of w over tokens of smaller d <
//   top_p * the sum of those that top_k and min_p keep; token: the first whose sum of kept w, in
//   the order of the vocabulary, is above uniform(seed, position) * the sum of all kept
//
// logits [num_rows, vocab_size] f32, f16, bf16. A cluster of 1 to 8 CTAs shares a row; its first
// one, the leader, decides. Pass 1 finds the maximum; pass 2 sums weights and counts tokens in bins
// of 1 / 128 nat, from whose edges the leader finds a range of d that the limit must lie in; pass 3
// sums what lies below that range and lists what lies in it, for the leader to find the limit among
// (ties are kept whole). Where more lie in it than the list holds, another pass counts them in
// finer bins, down to single values. Weights are summed by chunks of 1024 tokens, each by one warp,
// and chunks in one order, so that a row's token is the same in any batch. Without limits pass 3
// falls away; the drawn token is found by reading its chunk again.
//
// Bytes: 2 or 3 times num_rows * vocab_size * sizeof(T), a fourth where top_p is given and top_k or
// min_p, too. Bound by HBM in passes 1 and 3, and by issue slots and shared memory's atomics in
// pass 2; fraction reached: docs/kernels/sampling.md. Source: histogram selection is standard;
// counted random numbers are SplitMix64's (Steele, Lea, Flood 2014).

#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "cuda/sample_limits.cuh"

namespace bytetx {
namespace sampling {
namespace {

constexpr int kMaxCtas = 8;   // CTAs per row: more is no portable cluster
constexpr int kCtasAnSm = 2;  // by shared memory and registers

// The token of a chunk where this share of its kept weights is reached; by one warp.
template <typename T>
__device__ int draw_in_chunk(const Row& row, uint32_t limit, int chunk, double share) {
    constexpr int kSize = kVecSize<T>, kGroup = kWarpSize * kSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const auto kept = [&](float x) { return row.key(x) <= limit ? weight(row.distance(x)) : 0.0f; };
    double reached = 0.0;
    row.visit<T>(chunk, [&](float x, int) { reached += kept(x); });
    for (int by = kWarpSize / 2; by > 0; by /= 2) reached += __shfl_xor_sync(~0u, reached, by);
    const double target = share * reached;
    reached = 0.0;
    int last = -1;  // rounding may put a share at the very end
#pragma unroll 1
    for (int base = chunk * kChunk; base < (chunk + 1) * kChunk; base += kGroup) {
        const uint4 words = row.load_slowly<T>(base + lane * kSize);
        float weights[kSize];
        double own = 0.0;
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
            weights[e] = kept(element<T>(words, e));
            if (weights[e] > 0.0f) last = base + lane * kSize + e;
            own += weights[e];
        }
        double sum = own;
        for (int by = 1; by < kWarpSize; by *= 2) {
            const double other = __shfl_up_sync(~0u, sum, by);
            if (lane >= by) sum += other;
        }
        const unsigned above = __ballot_sync(~0u, own > 0.0 && reached + sum > target);
        if (above != 0) {
            double passed = reached + sum - own;
            int token = -1;
#pragma unroll
            for (int e = 0; e < kSize; ++e) {
                const bool is_next = weights[e] > 0.0f && (token < 0 || passed <= target);
                if (is_next) token = base + lane * kSize + e;
                passed += weights[e];
            }
            return __shfl_sync(~0u, token, __ffs(static_cast<int>(above)) - 1);
        }
        reached += __shfl_sync(~0u, sum, kWarpSize - 1);
    }
    return __reduce_max_sync(~0u, last);
}

// The token that this number in [0, 1) draws; by the leader.
template <typename T>
__device__ int draw(Leader<T>& leader, double number, Shared& s) {
    const auto chunk = static_cast<int>(threadIdx.x);
    leader.add_list();
    const double mass = leader.chunk_mass();
    if (chunk == 0) {
        s.chunk = kMaxChunks;
        s.last_chunk = 0;
    }
    const Scan scan = cta_scan(s, {mass, 0.0});  // its barriers stand before the minima
    const double target = number * scan.all.x;
    if (mass > 0.0 && scan.before.x + mass > target) atomicMin(&s.chunk, chunk);
    if (mass > 0.0) atomicMax(&s.last_chunk, chunk);
    __syncthreads();
    const int drawn = min(s.chunk, s.last_chunk);
    if (chunk == drawn) s.share = fmin(fmax((target - scan.before.x) / mass, 0.0), 1.0);
    __syncthreads();
    if (chunk >= kWarpSize) return -1;
    return draw_in_chunk<T>(s.row, leader.limit(), drawn, s.share);
}

// Top-k that row `index` asks for. Read where it is used, for registers are few.
__device__ int64_t top_k_of(const SampleParams& p, int64_t index) {
    const int64_t top_k = p.top_k == nullptr ? 0 : p.top_k[index];
    return top_k < p.vocab_size ? top_k : 0;
}

__device__ float top_p_of(const SampleParams& p, int64_t index) {
    return p.top_p == nullptr ? 1.0f : p.top_p[index];
}

__device__ float min_p_of(const SampleParams& p, int64_t index) {
    return p.min_p == nullptr ? 0.0f : p.min_p[index];
}

__device__ bool needs_bins(const SampleParams& p, int64_t index) {
    return top_k_of(p, index) > 0 || top_p_of(p, index) < 1.0f;
}

template <typename T>
__device__ Row row_of(const SampleParams& p, int64_t index) {
    const bool has_vecs = p.vocab_size % kVecSize<T> == 0 &&
                          reinterpret_cast<std::uintptr_t>(p.logits) % kVecBytes == 0;
    return {static_cast<const T*>(p.logits) + index * p.vocab_size,
            static_cast<int>(p.vocab_size),
            static_cast<int>((p.vocab_size + kChunk - 1) / kChunk),
            has_vecs,
            0.0f,
            0.0f};
}

template <typename T>
__device__ int lead(const SampleParams& p, int64_t index, Shared& s) {
    Leader<T> leader(s);
    if (needs_bins(p, index)) join_bins(s.bins);
    if (const auto top_k = top_k_of(p, index); top_k > 0) leader.keep_nearest(top_k);
    if (const float min_p = min_p_of(p, index); min_p > 0.0f) {
        leader.keep_within(fmaxf(-logf(min_p), 0.0f));
    }
    if (const float top_p = top_p_of(p, index); top_p < 1.0f) leader.keep_mass(top_p);
    leader.issue({Op::end, 0, 0});
    return draw(leader, uniform(p.seeds[index], p.positions[index]), s);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kCtasAnSm)
    sample_kernel(const __grid_constant__ SampleParams p) {
    extern __shared__ __align__(16) unsigned char smem[];
    auto& s = *reinterpret_cast<Shared*>(smem);
    const auto cluster = cg::this_cluster();
    const bool leads = cluster.block_rank() == 0;
    const int64_t index = blockIdx.x / cluster.num_blocks();
    release_next_kernel();
    wait_for_prior_kernel();
    Row row = row_of<T>(p, index);
    const Largest largest = largest_of(find_largest<T>(row, s));
    const float temperature = p.temperature[index];
    if (largest.token < 0 || temperature == 0.0f) {
        if (leads && threadIdx.x == 0) p.out[index] = largest.token;
        cluster.sync();  // no CTA ends while its cta_key may still be read
        return;
    }
    row.max = largest.value;
    // Inside f32, so that 0 * inverse is 0 and inf * inverse inf.
    row.inverse = fminf(fmaxf(1.0f / temperature, 0x1p-126f), 0x1p127f);
    if (threadIdx.x == 0) {
        s.row = row;
        s.list_count = 0;
    }
    __syncthreads();
    if (needs_bins(p, index)) {
        clear(s.bins);
        measure<T, true>(s);
    } else {
        measure<T, false>(s);
    }
    cluster.sync();  // the leader has every chunk's weight, and all bins are filled
    if (!leads) return follow<T>(s);
    const int token = lead<T>(p, index, s);
    if (threadIdx.x == 0) p.out[index] = token;
}

void check(const SampleParams& p) {
    if (p.vocab_size < 1 || p.vocab_size > kMaxChunks * kChunk) {
        throw std::invalid_argument("sample: vocab_size must be 1 to " +
                                    std::to_string(kMaxChunks * kChunk) + ", got " +
                                    std::to_string(p.vocab_size));
    }
}

}  // namespace
}  // namespace sampling

void sample(const SampleParams& p, const Launch& launch) {
    using namespace sampling;
    check(p);
    if (p.num_rows == 0) return;
    const DeviceGuard guard(launch.device);
    const int64_t places = static_cast<int64_t>(num_sms()) * kCtasAnSm;
    int num_ctas = 1;
    while (num_ctas < kMaxCtas && p.num_rows * num_ctas * 2 <= places) num_ctas *= 2;
    const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows * num_ctas)), dim3(kThreads),
                            sizeof(Shared), static_cast<cudaStream_t>(launch.stream), num_ctas};
    dispatch_dtype(p.dtype, [&]<typename T>() {
        allow_smem_once<sample_kernel<T>>(sizeof(Shared));
        launch_kernel(sample_kernel<T>, shape, p);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
