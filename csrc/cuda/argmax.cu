// The most likely token of each row of logits, also stored where the next step reads it.
//
//   out[i] = first j of the largest logits[i, j], -1 where that is no finite number or one is NaN;
//   last_tokens[slot_indices[i]] = max(out[i], 0)
//
// logits [num_rows, vocab_size] f32, f16, bf16. A cluster of 1 to 8 CTAs shares a row, so that few
// rows still take many SMs. Each of 256 threads keeps the 16 bytes that hold its largest element,
// by one comparison a vector, and finds the element in them at the end. Rows are read from their
// last element to their first: what the GEMM before wrote last is still in L2. Warps reduce keys of
// 64 bits, the value's ordered bits above the inverted index, so that the first of equal values
// wins; the cluster's first CTA reduces the others' through their shared memory.
//
// Bytes: num_rows * vocab_size * sizeof(T). Bound by HBM; fraction reached:
// docs/kernels/sampling.md.
// Source: standard.

#include <cooperative_groups.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "ops.h"

namespace bytetx {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxCtas = 8;     // CTAs per row: more is no portable cluster
constexpr int kCtasAnSm = 4;    // that are wanted; their loads in flight cover the latency
constexpr int kUnroll = 8;      // vectors of a thread in flight
constexpr uint32_t kNan = ~0u;  // above the ordered bits of every number

using Key = unsigned long long;

// The largest of a vector's elements, NaN where one is.
template <typename T>
__device__ __forceinline__ float largest_of(const uint4& words) {
    if constexpr (sizeof(T) == 4) {
        float best = element<T>(words, 0);
#pragma unroll
        for (int e = 1; e < kVecSize<T>; ++e) {
            asm("max.NaN.f32 %0, %0, %1;" : "+f"(best) : "f"(element<T>(words, e)));
        }
        return best;
    } else {
        using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
        const auto* pairs = reinterpret_cast<const Pair*>(&words);
        const Pair best =
            __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
        return static_cast<float>(__hmax_nan(best.x, best.y));
    }
}

// The largest of a thread's elements so far, in the vector that holds it. Vectors come from the
// last to the first, so that of equal elements the first stays.
template <typename T>
struct Best {
    float value = -INFINITY;
    uint32_t place = 0;  // index of the vector's first element
    uint4 words{};
    bool has_nan = false;

    __device__ __forceinline__ void add(const uint4& others, int64_t at) {
        const float other = largest_of<T>(others);
        if (other >= value) {
            value = other;
            place = static_cast<uint32_t>(at);
            words = others;
        }
        has_nan |= other != other;
    }

    // An element that is in no vector.
    __device__ __forceinline__ void add(T other, int64_t at) {
        Vec<T> same;
#pragma unroll
        for (int e = 0; e < kVecSize<T>; ++e) same.value[e] = other;
        add(*reinterpret_cast<const uint4*>(&same), at);
    }

    __device__ Key key() const {
        int first = 0;
#pragma unroll
        for (int e = kVecSize<T> - 1; e >= 0; --e) {
            if (element<T>(words, e) == value) first = e;
        }
        const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 is 0
        const uint32_t ordered = bits ^ (bits >> 31 ? ~0u : 1u << 31);
        return static_cast<Key>(has_nan ? kNan : ordered) << 32 | (~0u - (place + first));
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

// The share of CTA `rank` of num_ctas: chunks of a row's whole vectors in turn, from the last, and
// of the first rank the elements before and after them.
template <typename T>
__device__ Best<T> best_of(const T* row, int64_t size, int rank, int num_ctas) {
    constexpr int kChunk = kThreads * kUnroll;
    Best<T> best;
    const int thread = static_cast<int>(threadIdx.x);
    const auto offset = reinterpret_cast<std::uintptr_t>(row) % kVecBytes / sizeof(T);
    const int64_t skipped = offset ? kVecSize<T> - static_cast<int64_t>(offset) : 0;
    const int64_t body = min(skipped, size);
    const int64_t num_vecs = (size - body) / kVecSize<T>, tail = body + num_vecs * kVecSize<T>;
    const auto* vecs = reinterpret_cast<const uint4*>(row + body);
    if (rank == 0 && tail + thread < size) best.add(row[tail + thread], tail + thread);
    for (int64_t chunk = (num_vecs + kChunk - 1) / kChunk - 1 - rank; chunk >= 0;
         chunk -= num_ctas) {
        uint4 words[kUnroll];
        const int64_t base = chunk * kChunk + thread;
        const auto place = [&](int u) { return min(base + u * kThreads, num_vecs - 1); };
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) words[u] = load_once(vecs + place(u));
#pragma unroll
        for (int u = kUnroll - 1; u >= 0; --u) best.add(words[u], body + place(u) * kVecSize<T>);
    }
    if (rank == 0 && thread < body) best.add(row[thread], thread);
    return best;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) argmax_kernel(const __grid_constant__ ArgmaxParams p) {
    namespace cg = cooperative_groups;
    __shared__ Key warp_keys[kWarps], cta_key;
    const cg::cluster_group cluster = cg::this_cluster();
    const int num_ctas = static_cast<int>(cluster.num_blocks());
    const int rank = static_cast<int>(cluster.block_rank());
    const int64_t row = blockIdx.x / static_cast<unsigned>(num_ctas);
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    release_next_kernel();
    wait_for_prior_kernel();
    const auto* logits = static_cast<const T*>(p.logits) + row * p.vocab_size;
    Key key = warp_max(best_of(logits, p.vocab_size, rank, num_ctas).key());
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
            if (p.last_tokens) p.last_tokens[p.slot_indices[row]] = max(token, 0);
        }
    }
    cluster.sync();  // no CTA ends while its cta_key may still be read
}

}  // namespace

void argmax(const ArgmaxParams& p, const Launch& launch) {
    if (p.vocab_size < 1 || p.vocab_size > INT32_MAX) {
        throw std::invalid_argument("argmax: vocab_size must be 1 to 2^31 - 1, got " +
                                    std::to_string(p.vocab_size));
    }
    if (p.num_rows == 0) return;
    const DeviceGuard guard(launch.device);
    const int64_t wanted = static_cast<int64_t>(num_sms()) * kCtasAnSm;
    int num_ctas = 1;
    while (num_ctas < kMaxCtas && p.num_rows * num_ctas * 2 <= wanted) num_ctas *= 2;
    const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows * num_ctas)), dim3(kThreads), 0,
                            static_cast<cudaStream_t>(launch.stream), num_ctas};
    dispatch_dtype(p.dtype, [&]<typename T>() { launch_kernel(argmax_kernel<T>, shape, p); });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
