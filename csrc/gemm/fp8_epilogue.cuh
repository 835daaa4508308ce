// The epilogue of a GEMM of E4M3 rows: scales, bias, activation, gates, and rounding to Out.
//
// A thread goes through its sums by groups of columns, so that what belongs to columns is read once
// for all of its rows. Scales and biases wait in registers while the products run. Gates and their
// values are as LinearEpilogue has them.
#pragma once

#include <cuda_fp8.h>

#include "gemm/epilogue.cuh"

namespace bytetx::gemm {

// gelu_erf() for results that become E4M3, which is a 16th of their value off: a polynomial of
// degree 3 leaves 1/370 of the value, below 1e-3 4e-4. Its leading coefficient is negative, so z
// needs no bound.
__device__ __forceinline__ float gelu_erf_coarse(float x) {
    const float z = fabsf(x);
    float positive;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
    float log2_tail = fmaf(z, -0.01849038f, -0.52088085f);
    log2_tail = fmaf(log2_tail, z, -1.1127225f);
    log2_tail = fmaf(log2_tail, z, -1.00385553f);
    return fmaf(-z, exp2_approx(log2_tail), positive);
}

template <typename C, ActivationForm kForm, typename Out, bool kGated = false>
struct Fp8Epilogue : EpilogueDefaults, TileLayout<C> {
    struct Inputs {
        const float* a_scale;   // [m], or null for ones
        const float* b_scale;   // [n]
        const float* bias;      // [n], or null for zeros
        float inverse_d_scale;  // E4M3: what act() is multiplied by before it is rounded
        ActivationConstants activation;
    };
    using Layout = TileLayout<C>;
    using Layout::kColumnGroups;
    using Layout::kRowsOfThread;
    static constexpr bool kIsFp8 = sizeof(Out) == 1;
    static_assert(!kGated || (!kIsFp8 && kColumnGroups % 2 == 0));
    struct Columns {
        float scale[8], bias[8];
    };
    static_assert(C::kRowBlocks * C::kTileN <= 256, "sums leave no room for Columns");
    const Inputs& in;
    float row_scale[kRowsOfThread] = {};
    Columns columns[kColumnGroups] = {};

    template <typename K>
    __device__ __forceinline__ Fp8Epilogue(const K& k, int m, int n, int)
        : Layout(k.p, m, n), in(k.p.epilogue) {}

    // Before the products, so that nothing is waited for after them; what belongs to columns is
    // constant, and under way before wait(). Addresses outside are moved inside instead of skipped:
    // a branch around each load would let them come one by one.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) {
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
            const int column = this->inside_column(q);
            load_eight(columns[q].scale, in.b_scale + column);
            if (in.bias != nullptr) load_eight(columns[q].bias, in.bias + column);
        }
        wait();
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            row_scale[i] =
                in.a_scale == nullptr ? 1.0f : in.a_scale[min(this->row(i), this->p.m - 1)];
        }
        sums.clear();
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(const Accumulators& sums) const {
#pragma unroll
        for (int q = 0; q < kColumnGroups; q += kGated ? 2 : 1) {
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                float x[8];
                scale_eight(sums, i, q, x);
                if constexpr (kGated) {
                    float values[8];
                    scale_eight(sums, i, q + 1, values);
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        x[e] = activate<kForm>(x[e], in.activation) * values[e];
                    }
                }
                if (this->row(i) < this->p.m && this->has_group(q)) store_eight(x, i, q);
            }
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ void scale_eight(const Accumulators& sums, int i, int q,
                                                float (&x)[8]) const {
        const Columns& group = columns[q];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = fmaf(sums(this->at(i, q, e)) * row_scale[i], group.scale[e], group.bias[e]);
        }
    }

    __device__ __forceinline__ static void load_eight(float (&x)[8], const float* from) {
        const float4 low = __ldg(reinterpret_cast<const float4*>(from));
        const float4 high = __ldg(reinterpret_cast<const float4*>(from + 4));
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }

    __device__ __forceinline__ void store_eight(const float (&x)[8], int i, int q) const {
        const int stride = kGated ? this->p.n / 2 : this->p.n;
        const int column = kGated ? this->n / 2 + this->lane % 4 * 8 + q / 2 * kPermutedRows
                                  : this->first_column + q * kPermutedRows;
        Out* out = static_cast<Out*>(this->p.d) + int64_t{this->m} * stride +
                   ((this->row(i) - this->m) * stride + column);
        if constexpr (kIsFp8) {
            uint32_t words[2];
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const uint32_t low = fp8_pair(x[4 * w], x[4 * w + 1]);
                words[w] = low | fp8_pair(x[4 * w + 2], x[4 * w + 3]) << 16;
            }
            *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
        } else {
            uint32_t words[4];
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                words[e / 2] = pack(finished(x[e]), finished(x[e + 1]), Out{});
            }
            *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    __device__ __forceinline__ float finished(float x) const {
        if constexpr (kGated) return x;
        return activate<kForm>(x, in.activation);
    }

    __device__ __forceinline__ uint32_t fp8_pair(float low, float high) const {
        const float2 pair = make_float2(quantized(low), quantized(high));
        return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }

    __device__ __forceinline__ float quantized(float x) const {
        if constexpr (kForm == ActivationForm::erf) return gelu_erf_coarse(x) * in.inverse_d_scale;
        return activate<kForm>(x, in.activation) * in.inverse_d_scale;
    }
};

}  // namespace bytetx::gemm
