// The epilogue of tilings for small m, whose CTAs share k: each finishes a part of the tile, and
// gets that part's sums from all, pushed into its shared memory (st.async) and added up in the
// order of their ranks.
//
// A part is a set of registers, the same of every thread, so that what a thread gets is laid out as
// what it has. What finishes it is a short loop: instructions that run once are waited for.
#pragma once

#include "gemm/linear_epilogue.cuh"

namespace bytetx::gemm {

__device__ __forceinline__ void store_async(uint32_t address, float4 x, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

// Unit u of every thread's sums belongs to rank u % num_ranks.
template <typename C, ActivationForm kForm, bool kGated>
struct SplitKEpilogue : LinearEpilogue<C, kForm, kGated> {
    using Linear = LinearEpilogue<C, kForm, kGated>;
    using T = typename C::Element;
    using Linear::kUnits;
    using Linear::kUnitsOfRow;
    static constexpr int kEights = kGated ? 2 : 1;
    static constexpr int kThreads = C::kConsumerThreads;
    static constexpr int kUnitBytes = kEights * 32 * kThreads;
    struct Smem {
        uint64_t arrived;  // bytes of the units that this rank finishes
    };

    Smem& s;
    float4* memory;  // every rank's parts of the units that this rank finishes
    int rank, num_ranks;

    template <typename K>
    __device__ __forceinline__ SplitKEpilogue(const K& k, int m, int n, int round)
        : Linear(k, m, n, round),
          s(k.s.epilogue),
          memory(reinterpret_cast<float4*>(k.s.stages.behind(k.p.stages))),
          rank(k.at.rank),
          num_ranks(k.at.num_ranks) {}

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K& k) {
        const int units = num_units(k.at.rank, k.at.num_ranks);
        FullBarrier::init(&k.s.epilogue.arrived, 1);
        if (units > 0) {
            FullBarrier::arrive_and_expect(&k.s.epilogue.arrived,
                                           units * k.at.num_ranks * kUnitBytes);
        }
    }

    // Bytes of shared memory behind the stages.
    static __host__ __device__ int memory_bytes(int num_ranks) {
        return num_ranks == 1 ? 0 : most_units_of_rank(num_ranks) * num_ranks * kUnitBytes;
    }

    // Bias and residual of the units that this CTA will finish. The bias is a constant: it is under
    // way before wait(), which must come before what kernels write, and may still read.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        if (num_ranks == 1) return begin_units(sums, typename Linear::Everything{}, wait);
        OwnUnits owns{0};
        for (int u = rank; u < kUnits; u += num_ranks) owns.bits |= 1u << u;
        begin_units(sums, owns, wait);
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(const Accumulators& sums) const {
        if (num_ranks == 1) return Linear::finish(sums);
        wait_for_cluster();  // all ranks expect what now comes; pairs with sync_start()
        push(sums);
        finish_units();
    }

  private:
    struct OwnUnits {
        uint32_t bits;
        __device__ __forceinline__ bool operator()(int i, int q) const {
            return (bits >> (i * kUnitsOfRow + q / kEights) & 1) != 0;
        }
        __device__ __forceinline__ uint4 load(int i, int q, const T* eight) const {
            return load_if((*this)(i, q), eight);
        }
    };

    template <typename Accumulators, typename Owns, typename Wait>
    __device__ __forceinline__ void begin_units(Accumulators& sums, const Owns& owns,
                                                const Wait& wait) const {
        sums.clear();
        if (this->in.bias != nullptr) this->add_bias(sums, owns);
        wait();
        if (this->in.residual != nullptr) this->add_residual(sums, owns);
    }

    static __device__ __forceinline__ int num_units(int rank, int num_ranks) {
        return (kUnits - rank + num_ranks - 1) / num_ranks;
    }

    static __host__ __device__ int most_units_of_rank(int num_ranks) {
        return (kUnits + num_ranks - 1) / num_ranks;
    }
    // Address of half an eight from rank `from`, in the rank's unit number j.
    __device__ __forceinline__ float4* place(int j, int from, int eight, int half) const {
        return memory + (((j * num_ranks + from) * kEights + eight) * 2 + half) * kThreads +
               threadIdx.x;
    }

    template <typename Accumulators>
    __device__ __forceinline__ void push(const Accumulators& sums) const {
        int owner = 0, j = 0;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const int i = u / kUnitsOfRow, q = u % kUnitsOfRow * kEights;
            const uint32_t barrier = peer_address(&s.arrived, owner);
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                const auto at = [&](int e) { return sums(Linear::at(i, q + eight, e)); };
                const uint32_t target = peer_address(place(j, rank, eight, 0), owner);
                store_async(target, make_float4(at(0), at(1), at(2), at(3)), barrier);
                store_async(target + kThreads * 16, make_float4(at(4), at(5), at(6), at(7)),
                            barrier);
            }
            if (++owner == num_ranks) {
                owner = 0;
                ++j;
            }
        }
    }

    // Sum of what all ranks pushed, in the order of their ranks.
    __device__ __forceinline__ void add_up(int j, int eight, float (&sum)[8]) const {
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] = 0.0f;
#pragma unroll 4
        for (int from = 0; from < num_ranks; ++from) {
            const float4 low = *place(j, from, eight, 0), high = *place(j, from, eight, 1);
            sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
            sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
        }
    }

    __device__ __forceinline__ void finish_units() const {
        if (num_units(rank, num_ranks) == 0) return;
        FullBarrier::wait(&s.arrived, 0);
        const int64_t stride = kGated ? this->p.n / 2 : this->p.n;
        const int column = kGated ? this->n / 2 + this->lane % 4 * 8 : this->first_column;
#pragma unroll 1
        for (int u = rank, j = 0; u < kUnits; u += num_ranks, ++j) {
            const int row = this->row(u / kUnitsOfRow), q = u % kUnitsOfRow * kEights;
            float x[8], factor[8];
            add_up(j, 0, x);
            if constexpr (kGated) add_up(j, 1, factor);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[e] = activate<kForm>(x[e], this->in.activation);
                if constexpr (kGated) x[e] *= factor[e];
            }
            if (row >= this->p.m || !this->has_group(q)) continue;
            T* out = static_cast<T*>(this->p.d) + row * stride + column;
            *reinterpret_cast<uint4*>(out + q / kEights * kPermutedRows) =
                make_uint4(pack(x[0], x[1], T{}), pack(x[2], x[3], T{}), pack(x[4], x[5], T{}),
                           pack(x[6], x[7], T{}));
        }
    }
};

}  // namespace bytetx::gemm
