// The two ends of a tile whose rows are normalized before they are stored: see
// linear_norm_kernel.cuh.
//
// Registers of a thread: as linear_epilogue.cuh's. A quad of lanes has the rows of its tile, kRows
// of them, and all of the CTA's columns.
#pragma once

#include "cuda/linear_epilogue.cuh"
#include "cuda/linear_norm_types.cuh"

namespace bytetx::gemm {

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ uint32_t in_peer(const void* own, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(cute::cast_smem_ptr_to_uint(own)), "r"(rank));
    return address;
}

// One warpgroup's tile, the `round`-th that it works on.
template <typename C>
struct RowNormEdge {
    using T = typename C::Element;
    static constexpr int kRows = 2 * C::kRowBlocks;  // of a quad
    static constexpr int kGroups = C::kTileN / kPermutedRows;
    static constexpr int kPartColumns = C::kClusterCtas * C::kTileN;
    static constexpr int64_t kStride = C::kColumns;  // known here, it costs no registers
    static_assert(kRows == 2 || kRows == 4);         // a lane sends one row, or two lanes the same
    const RowNormParams& p;
    RowNormSmem<C>& s;
    int m;  // first row
    int round;
    int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    int row = thread / 32 * 16 + thread % 32 / 4;  // the thread's first, of the tile

    static __device__ __forceinline__ constexpr int row_offset(int i) {
        return i / 2 * 64 + i % 2 * 8;
    }
    static __device__ __forceinline__ constexpr int at(int i, int q, int e) {
        return TileEpilogue<C, Epilogue::linear, false>::at(i, q, e);
    }

    // The thread's columns of group q.
    __device__ __forceinline__ void load_eight(const float* of, int q, float (&x)[8]) const {
        const auto* at = reinterpret_cast<const float4*>(of + thread % 4 * 8 + q * kPermutedRows);
        reinterpret_cast<float4&>(x[0]) = at[0];
        reinterpret_cast<float4&>(x[4]) = at[1];
    }

    // sums = bias. The residual is added behind the products: it need not be there before.
    template <typename Accumulators>
    __device__ __forceinline__ void load(Accumulators& sums) const {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
            float bias[8];
            load_eight(s.bias, q, bias);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int e = 0; e < 8; ++e) sums(at(i, q, e)) = bias[e];
            }
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ void store(Accumulators& sums) const {
        float mean[kRows], squares[kRows], scale[kRows], offset[kRows];
        add_residual(sums);
        centre(sums, mean, squares);
        join(mean, squares, scale, offset);
        store_normalized(sums, scale, offset);
    }

    template <typename Accumulators>
    __device__ __forceinline__ void add_residual(Accumulators& sums) const {
        const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
        FullBarrier::wait(&s.residual_full[group], round % 2);  // pairs with fetch_residuals()
        const T* words = s.residual + row * kPermutedRows + thread % 4 * 8;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int q = 0; q < kGroups; ++q) {
                const uint4 eight = *reinterpret_cast<const uint4*>(
                    words + (q * C::kTileM + row_offset(i)) * kPermutedRows);
                const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const float2 pair = unpack(pairs[e / 2], T{});
                    sums(at(i, q, e)) += pair.x;
                    sums(at(i, q, e + 1)) += pair.y;
                }
            }
        }
        __syncwarp();
        if (thread % 32 == 0) EmptyBarrier::arrive(&s.residual_empty);
    }

    // Takes the mean of the CTA's columns from the sums. In two passes, so that a large mean costs
    // no digits.
    template <typename Accumulators>
    __device__ __forceinline__ void centre(Accumulators& sums, float (&mean)[kRows],
                                           float (&squares)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 8 * kGroups; ++j) sum[j % 2] += sums(at(i, j / 8, j % 8));
            mean[i] = quad_sum(sum[0] + sum[1]) * (1.0f / C::kTileN);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 8 * kGroups; ++j) {
                float& x = sums(at(i, j / 8, j % 8));
                x -= mean[i];
                sum[j % 2] = fmaf(x, x, sum[j % 2]);
            }
            squares[i] = quad_sum(sum[0] + sum[1]);
        }
    }

    // What centred sums are multiplied by, and what is added then. Lane t of a quad sends and joins
    // row t; every CTA joins in the same order, and so gets the same bits.
    __device__ __forceinline__ void join(const float (&mean)[kRows], const float (&squares)[kRows],
                                         float (&scale)[kRows], float (&offset)[kRows]) const {
        Moments own{mean[0], squares[0]};
#pragma unroll
        for (int i = 1; i < kRows; ++i) {
            if (thread % kRows != i) continue;
            own = {mean[i], squares[i]};
        }
        Moments all = join_cluster(own);
        if constexpr (C::kParts > 1) all = join_parts(all);
        const float factor = rsqrtf(fmaf(all.squares, 1.0f / C::kColumns, p.eps));
        const float shift = (own.mean - all.mean) * factor;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            scale[i] = __shfl_sync(0xffffffffu, factor, i, 4);
            offset[i] = __shfl_sync(0xffffffffu, shift, i, 4);
        }
    }

    // Moments of kCount times kEach columns. Source: Chan, Golub and LeVeque (1979).
    template <int kEach, int kCount>
    static __device__ __forceinline__ Moments merge(const Moments (&of)[kCount]) {
        Moments all{0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kCount; ++i) all.mean += of[i].mean;
        all.mean *= 1.0f / kCount;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float apart = of[i].mean - all.mean;
            all.squares += fmaf(apart * kEach, apart, of[i].squares);
        }
        return all;
    }

    __device__ __forceinline__ Moments join_cluster(Moments own) const {
        constexpr int kCtas = C::kClusterCtas;
        const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
        auto& places = s.moments[group][round % 2];
        uint64_t* arrived = &s.arrived[group][round % 2];
        if (thread == 0) FullBarrier::arrive_and_expect_tx(arrived, sizeof(places));
        const auto rank = static_cast<int>(cute::block_rank_in_cluster());
#pragma unroll
        for (int to = 0; to < kCtas; ++to) {  // the CTA itself is one of them
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
                "[%3];" ::"r"(in_peer(&places[rank][thread], to)),
                "f"(own.mean), "f"(own.squares), "r"(in_peer(arrived, to))
                : "memory");
        }
        FullBarrier::wait(arrived, round / 2 % 2);  // pairs with the peers' st.async
        Moments of[kCtas];
#pragma unroll
        for (int from = 0; from < kCtas; ++from) of[from] = places[from][thread];
        return merge<C::kTileN>(of);
    }

    // Eight bytes are written and read at once: what is not kAbsent has arrived, whole.
    __device__ __forceinline__ Moments join_parts(Moments own) const {
        constexpr int kParts = C::kParts;
        constexpr int kFromStep = C::kClusterCtas * kWarpgroupThreads;
        const int cta = static_cast<int>(blockIdx.x) % C::kGroupCtas;
        const int part = cta / C::kClusterCtas;
        uint64_t* places = p.workspace + int64_t{m / C::kTileM} * (kParts * kParts * kFromStep) +
                           (cta % C::kClusterCtas * kWarpgroupThreads + thread);
        const uint64_t sent =
            uint64_t{__float_as_uint(own.squares)} << 32 | __float_as_uint(own.mean);
#pragma unroll
        for (int i = 1; i < kParts; ++i) {
            const int place = (((part ^ i) * kParts) + part) * kFromStep;
            asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(places + place), "l"(sent)
                         : "memory");
        }
        Moments of[kParts];
#pragma unroll
        for (int from = 0; from < kParts; ++from) {
            of[from] = from == part ? own : take(places + (part * kParts + from) * kFromStep);
        }
        return merge<kPartColumns>(of);
    }

    // What a peer puts there (join_parts() there), and kAbsent in its place.
    static __device__ __forceinline__ Moments take(uint64_t* place) {
        uint64_t got;
        int spins = 0;
        do {
            if (++spins == kMostSpins) __trap();
            asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(got) : "l"(place) : "memory");
        } while (got == kAbsent);
        *place = kAbsent;
        return {__uint_as_float(static_cast<uint32_t>(got)),
                __uint_as_float(static_cast<uint32_t>(got >> 32))};
    }

    template <typename Accumulators>
    __device__ __forceinline__ void store_normalized(const Accumulators& sums,
                                                     const float (&scale)[kRows],
                                                     const float (&offset)[kRows]) const {
        const int cta = static_cast<int>(blockIdx.x) % C::kGroupCtas;
        const int column = cta * C::kTileN + thread % 4 * 8;
        T* out = static_cast<T*>(p.d) + (m + row) * kStride + column;
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
            float weight[8], shift[8];
            load_eight(s.weight, q, weight);
            load_eight(s.shift, q, shift);
            uint32_t words[kRows][4];
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    const auto value = [&](int e) {
                        const float normalized = fmaf(sums(at(i, q, e)), scale[i], offset[i]);
                        return fmaf(normalized, weight[e], shift[e]);
                    };
                    words[i][e / 2] = pack(value(e), value(e + 1), T{});
                }
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if (m + row + row_offset(i) >= p.m) continue;
                *reinterpret_cast<uint4*>(out + row_offset(i) * kStride + q * kPermutedRows) =
                    make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
            }
        }
    }
};

}  // namespace bytetx::gemm
