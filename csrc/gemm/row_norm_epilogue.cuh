// The epilogue of a GEMM whose CTAs own whole rows of d together, and norm them before they are
// stored.
//
// A warpgroup that has its sums takes their moments, sends them to the same warpgroup of the other
// CTAs, and joins what it gets from them; the other warpgroup multiplies meanwhile. Through
// distributed shared memory it reaches its cluster. Where rows are wider than two CTAs, kParts
// clusters exchange what they have joined through `workspace`: clusters of four leave 12 SMs of an
// H200 idle, pairs none. A quad of lanes has the rows of its tile, kRows of them, and all of the
// CTA's columns. The residual is a tile input.
#pragma once

#include "gemm/tile_input.cuh"

namespace bytetx::gemm {

// In workspace where nothing has arrived: no NaN that arithmetic gives.
constexpr uint64_t kAbsent = ~uint64_t{0};
constexpr int kMostSpins = 1 << 26;  // some ten seconds; then a peer is gone

// Mean of some columns of a row, and the sum of squares around it.
struct Moments {
    float mean, squares;
};

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <typename C>
struct RowNormEpilogue : EpilogueDefaults {
    struct Inputs {
        CUtensorMap residual_map;  // {32, m, n / 32}
        const void* bias;          // [n]
        const void* weight;        // [n]
        const void* shift;         // [n]
        uint64_t* workspace;       // [tiles_m, kParts (to), kParts (from), kClusterCtas, 128]
        float eps;
    };
    // The tile input is [kTileN / 32][kTileM][32]: what a quarter of a warp reads lies side by
    // side. Two places for moments: a peer that has this CTA's moments of one tile may send those
    // of the next before this CTA has read those of the first, but not those of the one after.
    struct Smem : TileInput<C, 128> {
        alignas(16) float bias[C::kTileN], weight[C::kTileN], shift[C::kTileN];
        Moments moments[C::kConsumers][2][C::kClusterCtas][kWarpgroupThreads];
        uint64_t arrived[C::kConsumers][2];
    };
    using T = typename C::Element;
    using Layout = TileLayout<C>;
    static constexpr bool kHasParameters = true;
    static constexpr int kRows = Layout::kRowsOfThread;  // rows per quad of threads
    static constexpr int kGroups = Layout::kColumnGroups;
    static constexpr int kPartColumns = C::kClusterCtas * C::kTileN;
    static constexpr int64_t kStride = C::kColumns;  // known here, it costs no registers
    static_assert(kRows == 2 || kRows == 4);         // a lane sends one row, or two lanes the same
    const Problem& p;
    const Inputs& in;
    Smem& s;
    int m;      // first row
    int round;  // the warpgroup's tile number
    int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    int row = thread / 32 * 16 + thread % 32 / 4;  // the thread's first, of the tile

    template <typename K>
    __device__ __forceinline__ RowNormEpilogue(const K& k, int m, int, int round)
        : p(k.p), in(k.p.epilogue), s(k.s.epilogue), m(m), round(round) {}

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K& k) {
        for (auto& barriers : k.s.epilogue.arrived) {
            for (uint64_t& barrier : barriers) FullBarrier::init(&barrier, 1);
        }
        init_input_barriers(k.s.epilogue);
    }

    // The CTA's columns of what no kernel writes.
    template <typename K>
    static __device__ __forceinline__ void load_parameters(const K& k) {
        const int n = k.at.tile_n(0);
        const auto load = [&](float* to, const void* from) {
            for (int i = static_cast<int>(threadIdx.x); i < C::kTileN; i += C::kThreads) {
                to[i] = static_cast<float>(static_cast<const T*>(from)[n + i]);
            }
        };
        load(k.s.epilogue.bias, k.p.epilogue.bias);
        load(k.s.epilogue.weight, k.p.epilogue.weight);
        load(k.s.epilogue.shift, k.p.epilogue.shift);
    }

    template <typename K>
    static __device__ __forceinline__ void fetch_input(const K& k, uint64_t* full, int tile, int) {
        const auto hint = L2Policy::evict_first;
        load_box(&k.p.epilogue.residual_map, full, hint, k.s.epilogue.input, 0, k.at.tile_m(tile),
                 k.at.tile_n(tile) / kPermutedRows);
    }

    static __device__ __forceinline__ constexpr int row_offset(int i) {
        return Layout::row_offset(i);
    }
    static __device__ __forceinline__ constexpr int at(int i, int q, int e) {
        return Layout::at(i, q, e);
    }

    // The thread's columns of group q.
    __device__ __forceinline__ void load_eight(const float* of, int q, float (&x)[8]) const {
        const auto* at = reinterpret_cast<const float4*>(of + thread % 4 * 8 + q * kPermutedRows);
        reinterpret_cast<float4&>(x[0]) = at[0];
        reinterpret_cast<float4&>(x[4]) = at[1];
    }

    // sums = bias. The residual is added behind the products: it need not be there before.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        wait();
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
    __device__ __forceinline__ void finish(Accumulators& sums) const {
        float mean[kRows], squares[kRows], scale[kRows], offset[kRows];
        add_residual(sums);
        centre(sums, mean, squares);
        join(mean, squares, scale, offset);
        store_normalized(sums, scale, offset);
    }

    template <typename Accumulators>
    __device__ __forceinline__ void add_residual(Accumulators& sums) const {
        wait_for_input(s, round);
        const T* words = s.input + row * kPermutedRows + thread % 4 * 8;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int q = 0; q < kGroups; ++q) {
                Layout::add(sums, i, q,
                            *reinterpret_cast<const uint4*>(
                                words + (q * C::kTileM + row_offset(i)) * kPermutedRows));
            }
        }
        release_input(s);
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

    // Factor of the centred sums, and the term added then. Lane t of a quad sends and joins row t;
    // every CTA joins in the same order, and so gets the same bits.
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
        const float factor = rsqrtf(fmaf(all.squares, 1.0f / C::kColumns, in.eps));
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
        if (thread == 0) FullBarrier::arrive_and_expect(arrived, sizeof(places));
        const auto rank = cluster_rank();
#pragma unroll
        for (int to = 0; to < kCtas; ++to) {  // the CTA itself is one of them
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
                "[%3];" ::"r"(peer_address(&places[rank][thread], to)),
                "f"(own.mean), "f"(own.squares), "r"(peer_address(arrived, to))
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
        uint64_t* places = in.workspace + int64_t{m / C::kTileM} * (kParts * kParts * kFromStep) +
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

    // Takes what a peer puts there (join_parts() there), and leaves kAbsent in its place.
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
