// The most likely token of each row of logits, and where the next step looks for it.
//
//   out[i] = first j of the largest logits[i, j], -1 where that is no finite number or one is NaN;
//   last_tokens[seats[i]] = max(out[i], 0)
//
// logits [num_rows, vocab_size] f32, f16, bf16. A cluster of 1 to 8 CTAs shares a row, so that few
// rows still take many SMs; each of 256 threads keeps the largest of its elements and its place,
// eight or four at a time where the row's address allows. Warps join keys of 64 bits, the value's
// ordered bits above the inverted place, so that of equal values the first wins; the cluster's
// first CTA joins the others' through their shared memory.
//
// Bytes: num_rows * vocab_size * sizeof(T). Bound by HBM; fraction reached: csrc/README.md.
// Source: standard.

#include <cooperative_groups.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxCtas = 8;     // of a row: more is no portable cluster
constexpr int kCtasAnSm = 4;    // that are wanted; their loads in flight cover the latency
constexpr int kUnroll = 4;      // vectors of a thread in flight
constexpr uint32_t kNan = ~0u;  // above the ordered bits of every number

using Key = unsigned long long;

// The largest of a thread's elements so far.
struct Best {
    float value = -INFINITY;
    uint32_t place = 0;
    bool has_nan = false;

    __device__ void add(float other, uint32_t at) {
        if (other > value) {
            value = other;
            place = at;
        }
        has_nan |= other != other;
    }

    __device__ Key key() const {
        const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 is 0
        const uint32_t ordered = bits ^ (bits >> 31 ? ~0u : 1u << 31);
        return static_cast<Key>(has_nan ? kNan : ordered) << 32 | (~0u - place);
    }
};

__device__ Key warp_max(Key key) {
    for (int by = kWarpSize / 2; by > 0; by /= 2) {
        const Key other = __shfl_xor_sync(~0u, key, by);
        key = other > key ? other : key;
    }
    return key;
}

// The token of a row's key, -1 where its largest logit is not finite.
__device__ int token_of(Key key) {
    const auto ordered = static_cast<uint32_t>(key >> 32);
    const uint32_t bits = ordered ^ (ordered >> 31 ? 1u << 31 : ~0u);
    const bool is_finite = ordered != kNan && isfinite(__uint_as_float(bits));
    return is_finite ? static_cast<int>(~0u - static_cast<uint32_t>(key)) : -1;
}

// Elements first ... end - 1 of a row: those before and after whole vectors one by one.
template <typename T>
__device__ Best best_of(const T* row, int64_t first, int64_t end) {
    Best best;
    const int thread = static_cast<int>(threadIdx.x);
    const auto offset = reinterpret_cast<std::uintptr_t>(row + first) % kVecBytes / sizeof(T);
    const int64_t skipped = offset ? kVecSize<T> - static_cast<int64_t>(offset) : 0;
    const int64_t body = min(first + skipped, end);
    const int64_t num_vecs = (end - body) / kVecSize<T>, tail = body + num_vecs * kVecSize<T>;
    const auto* vecs = reinterpret_cast<const uint4*>(row + body);
    for (int64_t j = first + thread; j < body; j += kThreads) {
        best.add(static_cast<float>(row[j]), static_cast<uint32_t>(j));
    }
    for (int64_t base = thread; base < num_vecs; base += kThreads * kUnroll) {
        uint4 words[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {  // clamped: all loads leave before one is used
            words[u] = load_once(vecs + min(base + u * kThreads, num_vecs - 1));
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int64_t at = body + min(base + u * kThreads, num_vecs - 1) * kVecSize<T>;
#pragma unroll
            for (int e = 0; e < kVecSize<T>; ++e) {
                best.add(element<T>(words[u], e), static_cast<uint32_t>(at + e));
            }
        }
    }
    for (int64_t j = tail + thread; j < end; j += kThreads) {
        best.add(static_cast<float>(row[j]), static_cast<uint32_t>(j));
    }
    return best;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    most_likely_kernel(const __grid_constant__ MostLikelyParams p) {
    namespace cg = cooperative_groups;
    __shared__ Key warp_keys[kWarps], cta_key;
    const cg::cluster_group cluster = cg::this_cluster();
    const auto num_ctas = static_cast<int64_t>(cluster.num_blocks());
    const auto rank = static_cast<int64_t>(cluster.block_rank());
    const int64_t row = blockIdx.x / num_ctas;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t share = (p.vocab_size + num_ctas - 1) / num_ctas;
    const int64_t first = min(rank * share, p.vocab_size);
    const auto* logits = static_cast<const T*>(p.logits) + row * p.vocab_size;
    Key key = warp_max(best_of(logits, first, min(first + share, p.vocab_size)).key());
    if (lane == 0) warp_keys[warp] = key;
    __syncthreads();
    if (warp == 0) {
        key = warp_max(lane < kWarps ? warp_keys[lane] : 0);
        if (lane == 0) cta_key = key;
    }
    cluster.sync();  // pairs with the first CTA's reads of every cta_key
    if (rank == 0 && warp == 0) {
        const unsigned other = static_cast<unsigned>(lane) % static_cast<unsigned>(num_ctas);
        key = warp_max(*cluster.map_shared_rank(&cta_key, other));
        if (lane == 0) {
            const int token = token_of(key);
            p.out[row] = token;
            if (p.last_tokens) p.last_tokens[p.seats[row]] = max(token, 0);
        }
    }
    cluster.sync();  // no CTA ends while its cta_key may still be read
}

}  // namespace

void most_likely(const MostLikelyParams& p, const Launch& launch) {
    if (p.vocab_size < 1 || p.vocab_size > INT32_MAX) {
        throw std::invalid_argument("most_likely: vocab_size must be 1 to 2^31 - 1, got " +
                                    std::to_string(p.vocab_size));
    }
    if (p.num_rows == 0) return;
    const DeviceGuard guard(launch.device);
    const int64_t wanted = static_cast<int64_t>(num_sms()) * kCtasAnSm;
    int num_ctas = 1;
    while (num_ctas < kMaxCtas && p.num_rows * num_ctas * 2 <= wanted) num_ctas *= 2;
    const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows * num_ctas)), dim3(kThreads), 0,
                            static_cast<cudaStream_t>(launch.stream), num_ctas};
    dispatch_dtype(p.dtype, [&]<typename T>() { launch_kernel(most_likely_kernel<T>, shape, p); });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
