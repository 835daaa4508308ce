// The epilogue of a linear layer: the bias is the accumulators' first value; activation, gates and
// rounding come behind the products. Residuals are left to the epilogues that derive from it:
// small m's and comm/'s add them to the first value, too, by add_residual().
//
// Gated: of every 64 columns of sums the first 32 are gates, the others their values, and the
// result has 32.
#pragma once

#include "gemm/epilogue.cuh"

namespace bytetx::gemm {

struct LinearInputs {
    const void* bias;      // [n], or null for none
    const void* residual;  // as d, or null for none; not where d is gated, nor by LinearEpilogue
    ActivationConstants activation;

    static LinearInputs of(const LinearParams& o) {
        return {o.bias, o.residual, activation_constants(o.activation)};
    }
};

template <typename C, ActivationForm kForm, bool kGated>
struct LinearEpilogue : EpilogueDefaults, TileLayout<C> {
    using Inputs = LinearInputs;
    using Layout = TileLayout<C>;
    using Layout::add;
    using Layout::at;
    using Layout::first_column;
    using Layout::has_group;
    using Layout::inside_column;
    using Layout::kColumnGroups;
    using Layout::kRowsOfThread;
    using Layout::lane;
    using Layout::m;
    using Layout::n;
    using Layout::p;
    using Layout::row;
    using T = typename C::Element;
    static_assert(!kGated || kColumnGroups % 2 == 0);
    // A unit: eight neighbours in a row, or eight gates and their eight values.
    static constexpr int kUnitsOfRow = kColumnGroups / (kGated ? 2 : 1);
    static constexpr int kUnits = kRowsOfThread * kUnitsOfRow;
    const Inputs& in;

    template <typename K>
    __device__ __forceinline__ LinearEpilogue(const K& k, int m, int n, int)
        : Layout(k.p, m, n), in(k.p.epilogue) {}

    // Whose bias and residual are added, as a function of the thread's row and column group.
    struct Everything {
        __device__ __forceinline__ constexpr bool operator()(int, int) const { return true; }
        __device__ __forceinline__ uint4 load(int, int, const T* eight) const {
            return __ldcs(reinterpret_cast<const uint4*>(eight));
        }
    };

    // sums = bias, or 0.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        sums.clear();
        if (in.bias != nullptr) add_bias(sums);
        wait();
    }

    template <typename Accumulators, typename Owns = Everything>
    __device__ __forceinline__ void add_residual(Accumulators& sums, const Owns& owns = {}) const {
        uint4 eights[kRowsOfThread][kColumnGroups];
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            const T* words =
                static_cast<const T*>(in.residual) + int64_t{min(row(i), p.m - 1)} * p.n;
#pragma unroll
            for (int q = 0; q < kColumnGroups; ++q) {
                eights[i][q] = owns.load(i, q, words + inside_column(q));
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
            for (int q = 0; q < kColumnGroups; ++q) add(sums, i, q, eights[i][q]);
        }
    }

    template <typename Accumulators, typename Owns = Everything>
    __device__ __forceinline__ void add_bias(Accumulators& sums, const Owns& owns = {}) const {
        uint4 eights[kColumnGroups];
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
            eights[q] = __ldg(
                reinterpret_cast<const uint4*>(static_cast<const T*>(in.bias) + inside_column(q)));
        }
#pragma unroll
        for (int q = 0; q < kColumnGroups; ++q) {
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                if (owns(i, q)) add(sums, i, q, eights[q]);
            }
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(const Accumulators& sums) const {
        store_groups(sums, 0, kColumnGroups);
    }

    // Column groups [first, end) of the sums.
    template <typename Accumulators>
    __device__ __forceinline__ void store_groups(const Accumulators& sums, int first,
                                                 int end) const {
        const int64_t stride = kGated ? p.n / 2 : p.n;
        const int column = kGated ? n / 2 + lane % 4 * 8 : first_column;
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (row(i) >= p.m) continue;
            T* out = static_cast<T*>(p.d) + row(i) * stride + column;
#pragma unroll
            for (int q = first; q < end; q += kGated ? 2 : 1) {
                if (!has_group(q)) continue;
                *reinterpret_cast<uint4*>(out + (kGated ? q / 2 : q) * kPermutedRows) =
                    rounded(sums, i, q);
            }
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ uint4 rounded(const Accumulators& sums, int i, int q) const {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            words[e / 2] = pack(value(sums, i, q, e), value(sums, i, q, e + 1), T{});
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    template <typename Accumulators>
    __device__ __forceinline__ float value(const Accumulators& sums, int i, int q, int e) const {
        const float x = activate<kForm>(sums(at(i, q, e)), in.activation);
        if constexpr (kGated) return x * sums(at(i, q + 1, e));
        return x;
    }
};

// As LinearEpilogue, with a residual that the threads load and add to the first value.
template <typename C, ActivationForm kForm, bool kGated>
struct ResidualFirstEpilogue : LinearEpilogue<C, kForm, kGated> {
    using Linear = LinearEpilogue<C, kForm, kGated>;
    using Linear::Linear;

    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        Linear::begin(sums, wait);
        if (this->in.residual != nullptr) this->add_residual(sums);
    }
};

}  // namespace bytetx::gemm
