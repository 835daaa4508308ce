// Sums of a cluster's CTAs, put down in shared memory and added up by whoever finishes them.
#pragma once

#include "cuda/linear_epilogue.cuh"

namespace bytetx::gemm {

// Eight neighbouring sums of a row: where they lie in the ring's memory once that is free.
template <typename C>
__device__ __forceinline__ float4* eight_sums(Smem<C>& s, int row, int group) {
    return reinterpret_cast<float4*>(s.a[0]) + (row * (C::kTileN / 8) + group) * 2;
}

// Adds what all ranks of the cluster have put down; each rank finishes its part of the tile.
// store(row, column, eight): of d.
template <typename C, Epilogue kEpilogue, bool kGated, typename Store>
__device__ __forceinline__ void add_up(const Params& p, Smem<C>& s, int m, int n, int rank,
                                       int num_ranks, const Store& store) {
    using T = typename C::Element;
    constexpr int kGroups = C::kTileN / 8;
    const auto total = [&](int row, int group, float (&sum)[8]) {
        const uint32_t local = cute::cast_smem_ptr_to_uint(eight_sums(s, row, group));
        for (int e = 0; e < 8; ++e) sum[e] = 0.0f;
        for (int from = 0; from < num_ranks; ++from) {
            uint32_t remote;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(from));
            float4 part[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(part[i].x), "=f"(part[i].y), "=f"(part[i].z), "=f"(part[i].w)
                             : "r"(remote + 16 * i));
                sum[4 * i] += part[i].x;
                sum[4 * i + 1] += part[i].y;
                sum[4 * i + 2] += part[i].z;
                sum[4 * i + 3] += part[i].w;
            }
        }
    };
    constexpr int kOutGroups = kGated ? kGroups / 2 : kGroups;
    for (int v = rank * kWarpgroupThreads + static_cast<int>(threadIdx.x);
         v < C::kTileM * kOutGroups; v += num_ranks * kWarpgroupThreads) {
        const int row = v / kOutGroups, group = v % kOutGroups;
        // Gated: 32 gates, then their 32 values.
        const int of_sums = kGated ? group / 4 * 8 + group % 4 : group;
        if (m + row >= p.m || n + of_sums * 8 >= p.n) continue;
        float x[8], factor[8];
        total(row, of_sums, x);
        if constexpr (kGated) total(row, of_sums + 4, factor);
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = activate<kEpilogue>(x[e], p.activation);
            if constexpr (kGated) x[e] *= factor[e];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pack(x[2 * i], x[2 * i + 1], T{});
        store(m + row, (kGated ? n / 2 : n) + group * 8,
              make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// Every thread's sums, where add_up() finds them.
template <typename C, typename Edge>
__device__ __forceinline__ void put_down(Smem<C>& s, const Edge& edge,
                                         const typename C::Sums& sums) {
    cutlass::arch::NamedBarrier::arrive_and_wait(kWarpgroupThreads, 0);  // the ring is read
#pragma unroll
    for (int i = 0; i < edge.kRowsOfThread; ++i) {
#pragma unroll
        for (int q = 0; q < edge.kColumnGroups; ++q) {
            float4* place = eight_sums(s, edge.row(i) - edge.m, q * 4 + edge.lane % 4);
            const auto at = [&](int e) { return sums(edge.at(i, q, e)); };
            place[0] = make_float4(at(0), at(1), at(2), at(3));
            place[1] = make_float4(at(4), at(5), at(6), at(7));
        }
    }
}

}  // namespace bytetx::gemm
