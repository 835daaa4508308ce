// How CTAs that share k put a tile together: each finishes a part of it, and gets that part's sums
// from all, pushed into its shared memory (st.async) and added up in the order of their ranks.
//
// A part is a set of registers, the same of every thread, so that what a thread gets is laid out as
// what it has. What finishes it is a short loop: instructions that run once are waited for.
#pragma once

#include "cuda/linear_epilogue.cuh"

namespace bytetx::gemm {

__device__ __forceinline__ uint32_t address_at(const void* own, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(remote)
        : "r"(cute::cast_smem_ptr_to_uint(own)), "r"(rank));
    return remote;
}

__device__ __forceinline__ void store_async(uint32_t address, float4 x, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

// Unit u of every thread's sums belongs to rank u % num_ranks.
template <typename C, Epilogue kEpilogue, bool kGated>
struct Parts {
    using T = typename C::Element;
    using TileEpilogueType = TileEpilogue<C, kEpilogue, kGated>;
    static constexpr int kEights = kGated ? 2 : 1;
    static constexpr int kUnitsOfRow = TileEpilogueType::kUnitsOfRow;
    static constexpr int kUnits = TileEpilogueType::kUnits;
    static constexpr int kThreads = C::Tile::kConsumerThreads;
    static constexpr int kUnitBytes = kEights * 32 * kThreads;

    float4* memory;     // of all units that this rank finishes, from every rank
    uint64_t* arrived;  // bytes of them
    int rank, num_ranks;

    static __host__ __device__ bool are_used(int num_ranks) { return num_ranks > 1; }
    static __host__ __device__ int most_units_of_rank(int num_ranks) {
        return (kUnits + num_ranks - 1) / num_ranks;
    }
    static __host__ __device__ int memory_bytes(int num_ranks) {
        return most_units_of_rank(num_ranks) * num_ranks * kUnitBytes;
    }
    __device__ __forceinline__ int num_units() const {
        return (kUnits - rank + num_ranks - 1) / num_ranks;
    }

    __device__ __forceinline__ void expect() const {
        FullBarrier::init(arrived, 1);
        if (num_units() > 0) {
            FullBarrier::arrive_and_expect_tx(arrived, num_units() * num_ranks * kUnitBytes);
        }
    }

    // Of the rank's unit number j: half an eight from a rank.
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
            const uint32_t barrier = address_at(arrived, owner);
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                const auto at = [&](int e) { return sums(TileEpilogueType::at(i, q + eight, e)); };
                const uint32_t target = address_at(place(j, rank, eight, 0), owner);
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

    // What all ranks pushed, in the order of their ranks.
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

    __device__ __forceinline__ void finish(const TileEpilogueType& epilogue) const {
        if (num_units() == 0) return;
        FullBarrier::wait(arrived, 0);
        const Params& p = epilogue.p;
        const int64_t stride = kGated ? p.n / 2 : p.n;
        const int column = kGated ? epilogue.n / 2 + epilogue.lane % 4 * 8 : epilogue.first_column;
#pragma unroll 1
        for (int u = rank, j = 0; u < kUnits; u += num_ranks, ++j) {
            const int row = epilogue.row(u / kUnitsOfRow), q = u % kUnitsOfRow * kEights;
            float x[8], factor[8];
            add_up(j, 0, x);
            if constexpr (kGated) add_up(j, 1, factor);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[e] = activate<kEpilogue>(x[e], p.activation);
                if constexpr (kGated) x[e] *= factor[e];
            }
            if (row >= p.m || !epilogue.has_group(q)) continue;
            T* out = static_cast<T*>(p.d) + row * stride + column;
            *reinterpret_cast<uint4*>(out + q / kEights * kPermutedRows) =
                make_uint4(pack(x[0], x[1], T{}), pack(x[2], x[3], T{}), pack(x[4], x[5], T{}),
                           pack(x[6], x[7], T{}));
        }
    }
};

}  // namespace bytetx::gemm
