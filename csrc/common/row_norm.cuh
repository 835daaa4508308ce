// Norms of rows that lie in registers: the tilings a row can have, its statistics and its stores.
// Kernels differ in how a row comes about: cuda/norm_rows.cuh, cuda/embedding.cu.
#pragma once

#include <cuda_fp8.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"

namespace bytetx {

// A type, not a constexpr value: nvcc 13.0 writes host stubs that do not compile for the latter.
template <int kThreads, int kRows, int kVecs>
struct RowTiling {
    static constexpr int kThreadsPerRow = kThreads;
    static constexpr int kRowsPerCta = kRows;
    static constexpr int kVecsPerThread = kVecs;
    static constexpr int kCtaThreads = kThreads * kRows;
    static constexpr int kRowsPerWarp = kThreads < kWarpSize ? kWarpSize / kThreads : 1;
    static constexpr bool kIsSpread = false;
};

// A warp's row of kVecs vectors a thread, spread over as many warps of a CTA, with the same bits.
template <int kVecs>
struct SpreadTiling : RowTiling<kVecs * kWarpSize, 1, 1> {
    static constexpr bool kIsSpread = true;
};

constexpr int kWarpsPerCta = 4;      // where a warp owns a row
constexpr int kCtaThreads = 256;     // where a CTA owns a row
constexpr int kWarpFeatures = 1024;  // 32 f32 registers a thread; above, a CTA hides latency better

// Norm of a row h: layer (h - mean) / sqrt(var + eps), rms h / sqrt(mean(h^2) + eps), none h.
enum class RowNorm { layer, rms, none };

// One thread's share of a row, in f32: vector lane + i * kThreadsPerRow of the row is its i-th.
template <typename T, typename Tiling>
using RowRegisters = float[Tiling::kVecsPerThread][kVecSize<T>];

// Features of a row that fills its registers: with so many, every bound is known to the compiler.
template <typename T, typename Tiling>
constexpr int kFullRow = Tiling::kThreadsPerRow * Tiling::kVecsPerThread * kVecSize<T>;

// A row as it lies in memory; zeros where the row has ended or was not loaded.
template <typename Tiling>
struct RawRow {
    uint4 words[Tiling::kVecsPerThread] = {};

    // load: from const uint4* to uint4
    template <typename Load>
    __device__ __forceinline__ void load(const void* rows, int64_t row, int lane, int num_vecs,
                                         const Load& load) {
        const uint4* first = static_cast<const uint4*>(rows) + row * num_vecs + lane;
#pragma unroll
        for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
            const int v = i * Tiling::kThreadsPerRow;
            if (lane + v < num_vecs) words[i] = load(first + v);
        }
    }
};

// A row as it is, rounded once.
template <typename T, typename Tiling>
__device__ __forceinline__ void store_row(void* rows, const RowRegisters<T, Tiling>& h, int lane,
                                          int64_t row, int num_vecs) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v < num_vecs) static_cast<uint4*>(rows)[row * num_vecs + v] = pack<T>(h[i]);
    }
}

// A parameter [hidden_size] that every row needs, null for zeros. It stays in registers where a
// row takes few; else each row reads it from L1.
template <typename Tiling, bool kIsKept = Tiling::kVecsPerThread <= 4>
class RowParameter {
  public:
    __device__ __forceinline__ RowParameter(const void* values, int lane, int num_vecs)
        : values_(static_cast<const uint4*>(values)) {
        if constexpr (kIsKept) {
            if (values != nullptr) kept_.load(values, 0, lane, num_vecs, load_vec);
        }
    }

    // Vector i of the thread, which is vector v of the row.
    __device__ __forceinline__ uint4 get(int i, int v) const {
        if constexpr (kIsKept) {
            // Opaque, or the compiler widens it to f32 before the loop: twice the registers.
            uint4 words = kept_.words[i];
            asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
            return words;
        }
        return values_ == nullptr ? uint4{} : __ldg(values_ + v);
    }

  private:
    static __device__ __forceinline__ uint4 load_vec(const uint4* at) { return __ldg(at); }

    const uint4* values_;
    RawRow<Tiling> kept_;
};

// Where a row goes; null for what is not wanted.
struct RowOutputs {
    void* out;         // [rows, hidden_size], T
    uint8_t* out_fp8;  // [rows, hidden_size], E4M3 of what `out` holds, over its scale
    float* out_scale;  // [rows]: largest magnitude / 448
    bool streams;      // `out` is more than the L2 would keep for its reader
};

// The row's sum of what its threads have: each a value a vector, added up in the vectors' order
// before lanes are joined, so that a spread row has the bits of a warp's.
template <typename Tiling>
__device__ __forceinline__ float sum_row(const float (&of_vecs)[Tiling::kVecsPerThread]) {
    float sum = of_vecs[0];
    if constexpr (Tiling::kIsSpread) {
        constexpr int kWarps = Tiling::kThreadsPerRow / kWarpSize;
        __shared__ float of_warps[kWarps][kWarpSize];
        const unsigned lane = threadIdx.x % kWarpSize;
        __syncthreads();  // pairs with the reads of the sum_row before this one
        of_warps[threadIdx.x / kWarpSize][lane] = sum;
        __syncthreads();
        sum = of_warps[0][lane];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) sum += of_warps[warp][lane];
        return row_sum<kWarpSize>(sum);
    } else {
#pragma unroll
        for (int i = 1; i < Tiling::kVecsPerThread; ++i) sum += of_vecs[i];
        return row_sum<Tiling::kThreadsPerRow>(sum);
    }
}

template <typename T, typename Tiling>
__device__ __forceinline__ float sum_of(const RowRegisters<T, Tiling>& h) {
    float sums[Tiling::kVecsPerThread] = {};
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) sums[i] += h[i][j];  // zeros beyond the row's end
    }
    return sum_row<Tiling>(sums);
}

// Centres h around its mean where the norm does and returns the factor that it is scaled by. The
// variance is taken around the mean, in a second pass over registers, so a large mean costs no
// digits.
template <typename T, typename Tiling, RowNorm kNorm>
__device__ __forceinline__ float centre_row(RowRegisters<T, Tiling>& h, int lane,
                                            int64_t hidden_size, float eps) {
    if constexpr (kNorm == RowNorm::none) return 1.0f;
    const int num_vecs = static_cast<int>(hidden_size / kVecSize<T>);
    const float inverse_size = 1.0f / static_cast<float>(hidden_size);
    float mean = 0.0f;
    // Rounded here, or one kernel fuses it into the subtraction, and another with the same row
    // does not.
    if constexpr (kNorm == RowNorm::layer) mean = __fmul_rn(sum_of<T, Tiling>(h), inverse_size);
    float squares[Tiling::kVecsPerThread] = {};
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        if (lane + i * Tiling::kThreadsPerRow >= num_vecs) continue;
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) {
            h[i][j] -= mean;
            squares[i] = fmaf(h[i][j], h[i][j], squares[i]);
        }
    }
    return rsqrtf(fmaf(sum_row<Tiling>(squares), inverse_size, eps));
}

constexpr float kFp8Max = 448.0f;           // largest number in E4M3
constexpr float kSmallestAmax = 0x1p-100f;  // its inverse and its scale are normal f32

// E4M3 of a row that was rounded to T: q = e4m3(row * (448 / amax)), scale = amax / 448.
template <typename T, typename Tiling>
__device__ __forceinline__ void store_fp8_row(const uint4 (&words)[Tiling::kVecsPerThread],
                                              int lane, int64_t row, int num_vecs,
                                              const RowOutputs& to) {
    constexpr int kSize = kVecSize<T>;
    float amax = kSmallestAmax;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) amax = fmaxf(amax, fabsf(element<T>(words[i], j)));
    }
    amax = row_max<Tiling::kThreadsPerRow>(amax);
    const float inverse = __fdiv_rn(kFp8Max, amax);
    if (lane == 0) to.out_scale[row] = __fdiv_rn(amax, kFp8Max);
    struct alignas(kSize) Quantized {
        __nv_fp8x2_storage_t pairs[kSize / 2];
    };
    auto* out = reinterpret_cast<Quantized*>(to.out_fp8) + row * num_vecs;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        Quantized quantized;
#pragma unroll
        for (int j = 0; j < kSize; j += 2) {
            const float2 pair = make_float2(element<T>(words[i], j) * inverse,
                                            element<T>(words[i], j + 1) * inverse);
            quantized.pairs[j / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
        }
        out[v] = quantized;
    }
}

template <typename Tiling>
__device__ __forceinline__ void store_words(const uint4 (&words)[Tiling::kVecsPerThread], int lane,
                                            int64_t row, int num_vecs, const RowOutputs& to) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        auto* at = static_cast<uint4*>(to.out) + row * num_vecs + v;
        to.streams ? store_streaming(at, words[i]) : void(*at = words[i]);
    }
}

// out[row] = the norm of h * weight + bias, rounded once.
template <typename T, typename Tiling, RowNorm kNorm, typename Parameter>
__device__ __forceinline__ void store_normalized_row(RowRegisters<T, Tiling>& h, int lane,
                                                     int64_t row, const Parameter& weight,
                                                     const Parameter& bias, int64_t hidden_size,
                                                     float eps, const RowOutputs& to) {
    const int num_vecs = static_cast<int>(hidden_size / kVecSize<T>);
    const float scale = centre_row<T, Tiling, kNorm>(h, lane, hidden_size, eps);
    uint4 words[Tiling::kVecsPerThread] = {};
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        if constexpr (kNorm != RowNorm::none) {
            const uint4 factors = weight.get(i, v);
            const uint4 shifts = kNorm == RowNorm::layer ? bias.get(i, v) : uint4{};
#pragma unroll
            for (int j = 0; j < kVecSize<T>; ++j) {
                h[i][j] =
                    fmaf(__fmul_rn(h[i][j], scale), element<T>(factors, j), element<T>(shifts, j));
            }
        }
        words[i] = pack<T>(h[i]);
    }
    if (to.out != nullptr) store_words<Tiling>(words, lane, row, num_vecs, to);
    if (to.out_fp8 != nullptr) store_fp8_row<T, Tiling>(words, lane, row, num_vecs, to);
}

// The norm of a row of any size, by a CTA of kCtaThreads, element by element: load_h(i) gives
// element i in f32 and is called up to three times, of which the last two are served by caches.
// store(i, value) takes the result; it may overwrite what load_h reads, for an element is stored by
// its last reader.
template <typename T, RowNorm kNorm, typename LoadH, typename Store>
__device__ __forceinline__ void norm_any_row(const LoadH& load_h, const void* weights,
                                             const void* biases, int64_t hidden_size, float eps,
                                             const Store& store) {
    const T* weight = static_cast<const T*>(weights);
    const T* bias = static_cast<const T*>(biases);
    const float inverse_size = 1.0f / static_cast<float>(hidden_size);
    float mean = 0.0f;
    if constexpr (kNorm == RowNorm::layer) {
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < hidden_size; i += kCtaThreads) sum += load_h(i);
        mean = __fmul_rn(row_sum<kCtaThreads>(sum), inverse_size);
    }
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < hidden_size; i += kCtaThreads) {
        const float centred = load_h(i) - mean;
        squares += centred * centred;
    }
    const float scale = rsqrtf(row_sum<kCtaThreads>(squares) * inverse_size + eps);
    for (int64_t i = threadIdx.x; i < hidden_size; i += kCtaThreads) {
        const float normalized = (load_h(i) - mean) * scale;
        const float shift = bias ? static_cast<float>(bias[i]) : 0.0f;
        store(i, normalized * static_cast<float>(weight[i]) + shift);
    }
}

// Calls f.operator()<Tiling>() with the registers that hold a row; returns false where none do.
template <typename T, typename F>
bool dispatch_row_tiling(int64_t hidden_size, F&& f) {
    const int64_t num_vecs = hidden_size / kVecSize<T>;
    if (hidden_size <= kWarpFeatures) {
        const int64_t vecs = (num_vecs + kWarpSize - 1) / kWarpSize;
        const auto with_vecs = [&]<int kVecs>() {
            f.template operator()<RowTiling<kWarpSize, kWarpsPerCta, kVecs>>();
        };
        if constexpr (sizeof(T) == 2) {
            return dispatch_at_least<1, 2, 3, 4>(vecs, with_vecs);
        } else {
            return dispatch_at_least<1, 2, 3, 4, 6, 8>(vecs, with_vecs);
        }
    }
    return dispatch_at_least<1, 2, 4, 6, 8>(
        (num_vecs + kCtaThreads - 1) / kCtaThreads,
        [&]<int kVecs>() { f.template operator()<RowTiling<kCtaThreads, 1, kVecs>>(); });
}

// The same; rows of 33 to 48 vectors lie in half a warp each, where a warp would leave a quarter of
// its lanes idle. The kernel keeps a warp's rows in step.
template <typename T, typename F>
bool dispatch_packed_row_tiling(int64_t hidden_size, F&& f) {
    constexpr int kLanes = kWarpSize / 2, kVecs = 3;
    const int64_t num_vecs = hidden_size / kVecSize<T>;
    if (num_vecs <= kWarpSize || num_vecs > kLanes * kVecs) {
        return dispatch_row_tiling<T>(hidden_size, f);
    }
    f.template operator()<RowTiling<kLanes, 2 * kWarpsPerCta, kVecs>>();
    return true;
}

// Whether an output is more than the L2 keeps beside what else passes through it.
inline bool is_beyond_l2(int64_t bytes, int device) {
    constexpr int kDevices = 64;
    static std::array<std::atomic<int64_t>, kDevices> known{};  // asked once a device
    auto& l2_bytes = known[static_cast<size_t>(device) % kDevices];
    if (l2_bytes.load(std::memory_order_relaxed) == 0) {
        int found = 0;
        BYTETX_CUDA_CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrL2CacheSize, device));
        l2_bytes.store(found, std::memory_order_relaxed);
    }
    return bytes > l2_bytes.load(std::memory_order_relaxed) / 2;
}

// CTAs of the kernel that a device can hold at once. Raises the kernel's limit of shared memory, so
// ask once and keep the answer.
template <typename Kernel>
int64_t resident_ctas(Kernel kernel, int cta_threads, int smem_bytes, int device) {
    int ctas = 0;
    int sms = 0;
    BYTETX_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
    BYTETX_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, cta_threads, smem_bytes));
    BYTETX_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    return int64_t{ctas} * sms;
}

}  // namespace bytetx
