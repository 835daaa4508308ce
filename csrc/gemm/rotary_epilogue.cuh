// The epilogue of the product that gives q, k and v: heads of 64 features are rotated behind it.
//
// A thread has eight neighbours of every 32 columns (kPermutedRows), so that it has both features
// of its pairs (i, i + 32). They are rounded before they turn, as if a kernel had stored them.
#pragma once

#include "common/rotation.cuh"
#include "gemm/linear_epilogue.cuh"

namespace bytetx::gemm {

template <typename C>
struct RotaryEpilogue : LinearEpilogue<C, ActivationForm::linear, false> {
    using Linear = LinearEpilogue<C, ActivationForm::linear, false>;
    using Linear::kColumnGroups;
    using Linear::kRowsOfThread;
    using T = typename C::Element;
    static constexpr int kGroupsOfHead = 2;
    static constexpr int kPairs = kPermutedRows;  // a head has
    static_assert(kColumnGroups % kGroupsOfHead == 0);
    struct Inputs : LinearInputs {
        const float* cos;  // [num_positions, kPairs]
        const float* sin;
        const int32_t* position_ids;  // [m]
        int rotated_columns;
    };
    const Inputs& in;

    template <typename K>
    __device__ __forceinline__ RotaryEpilogue(const K& k, int m, int n, int round)
        : Linear(k, m, n, round), in(k.p.epilogue) {}

    template <typename Accumulators>
    __device__ __forceinline__ void finish(const Accumulators& sums) const {
        if (this->n >= in.rotated_columns) return Linear::finish(sums);
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            const int position = __ldg(in.position_ids + min(this->row(i), this->p.m - 1));
            const Turns turns(in, position * kPairs + this->lane % 4 * 8);
            if (this->row(i) >= this->p.m) continue;
            T* out =
                static_cast<T*>(this->p.d) + int64_t{this->row(i)} * this->p.n + this->first_column;
#pragma unroll
            for (int q = 0; q < kColumnGroups; q += kGroupsOfHead) {
                if (!this->has_group(q)) continue;
                uint4 first = this->rounded(sums, i, q), second = this->rounded(sums, i, q + 1);
                if (this->n + q * kPermutedRows < in.rotated_columns) turns.apply(first, second);
                *reinterpret_cast<uint4*>(out + q * kPermutedRows) = first;
                *reinterpret_cast<uint4*>(out + (q + 1) * kPermutedRows) = second;
            }
        }
    }

  private:
    struct Turns {
        float cos[8], sin[8];

        __device__ __forceinline__ Turns(const Inputs& in, int first) {
#pragma unroll
            for (int e = 0; e < 8; e += 4) {
                *reinterpret_cast<float4*>(cos + e) =
                    __ldg(reinterpret_cast<const float4*>(in.cos + first + e));
                *reinterpret_cast<float4*>(sin + e) =
                    __ldg(reinterpret_cast<const float4*>(in.sin + first + e));
            }
        }

        __device__ __forceinline__ void apply(uint4& first, uint4& second) const {
            apply(first.x, second.x, 0);
            apply(first.y, second.y, 2);
            apply(first.z, second.z, 4);
            apply(first.w, second.w, 6);
        }

        __device__ __forceinline__ void apply(uint32_t& first, uint32_t& second, int e) const {
            float2 a = unpack(first, T{}), b = unpack(second, T{});
            rotate(a.x, b.x, cos[e], sin[e]);
            rotate(a.y, b.y, cos[e + 1], sin[e + 1]);
            first = pack(a.x, a.y, T{});
            second = pack(b.x, b.y, T{});
        }
    };
};

}  // namespace bytetx::gemm
