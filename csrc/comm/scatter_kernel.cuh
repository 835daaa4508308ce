// The persistent GEMM kernel whose tiles go straight to the ranks that sum them up.
//
// A tile's rows are stored, 16 bytes a thread, into this rank's slot in the memory of whoever owns
// them; when all have been performed, the tile is counted there. Tiles begin with the rows of the
// next rank and end with this one's, so that no two ranks write to one at a time.
#pragma once

#include "comm/peers.cuh"
#include "comm/schedule.cuh"
#include "cuda/linear_kernel.cuh"

namespace bytetx::gemm {

using comm::Counted;

struct ScatterParams {
    Params gemm;  // residual: partial
    CUtensorMap slots[kMaxPeers];  // this rank's at each owner: {n, its rows, parity}
    comm::Peers peers;
    int offsets[kMaxPeers + 1];
    Bands bands;
    int mode;  // experiment: 1 pairs, 2 fence a row, 4 fence two groups, 16 local, 32 no fence
    bool alternates;
};

// Where rank `source` puts its part of `row`, and what lies behind it, in elements of the slots.
__device__ __forceinline__ int64_t slot_row(int source, int num_rows, int row) {
    return int64_t{source} * num_rows + row;
}

constexpr int kBoxRows = 16, kBoxColumns = 64;  // of a bulk store: a warp's rows, 128 bytes each
constexpr int kBoxBytes = kBoxRows * kBoxColumns * kElementBytes;

template <typename C>
struct StagedSmem {
    Smem<C> gemm;
    alignas(1024) uint8_t boxes[C::kConsumers * 4][kBoxBytes];
};

template <typename C, bool kIsStaged>
struct ScatterEdge : TileEdge<C, Epilogue::linear, false> {
    using Base = TileEdge<C, Epilogue::linear, false>;
    using T = typename C::Element;
    const ScatterParams& all;
    uint32_t epoch;
    uint8_t* box = nullptr;

    // Staged: each warp takes its rows through shared memory, box by box, and its first thread sends
    // them on by bulk stores, of which few are under way at once.
    template <typename Sums>
    __device__ __forceinline__ void store_boxes(const Sums& sums) const {
        const int lane = this->lane;
        const int64_t began = clock64();
#pragma unroll
        for (int block = 0; block < C::kRowBlocks; ++block) {
            const int first = this->m + block * 64 +
                              static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16;
#pragma unroll
            for (int c = 0; c < C::kTileN / kBoxColumns; ++c) {
                const int column = this->n + c * kBoxColumns;
                if (column >= this->p.n || first >= this->p.m) continue;
                if (lane == 0) {
                    if (all.mode & 2) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                    else asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                }
                __syncwarp();
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int q = 0; q < 2; ++q) {
                        const int row = lane / 4 + 8 * half;
                        const int place = (q * 4 + lane % 4) ^ (row % 8);  // 128-byte swizzle
                        *reinterpret_cast<uint4*>(box + row * 128 + place * 16) =
                            this->finish(sums, 2 * block + half, 2 * c + q);
                    }
                }
                cutlass::arch::fence_view_async_shared();
                __syncwarp();
                if (lane == 0) {
                    const int last = owner_of(min(first + kBoxRows, this->p.m) - 1);
                    for (int owner = owner_of(first); owner <= last; ++owner) {
                        if (all.offsets[owner] == all.offsets[owner + 1]) continue;
                        cute::SM90_TMA_STORE_3D::copy(&all.slots[owner], box, column,
                                                      first - all.offsets[owner],
                                                      static_cast<int>(epoch & 1));
                    }
                    cute::tma_store_arrive();
                }
                pace(began, block * (C::kTileN / kBoxColumns) + c + 1, C::kRowBlocks * (C::kTileN / kBoxColumns));
            }
        }
        if (lane == 0 && this->m < this->p.m) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            comm::fence_proxies();
            comm::fence_system();
            count();
        }
        __syncwarp();
    }

    __device__ __forceinline__ int owner_of(int row) const {
        int owner = 0;
        while (row >= all.offsets[owner + 1]) ++owner;
        return owner;
    }

    __device__ __forceinline__ T* slot_of(int row) const {
        const int owner = owner_of(row), first = all.offsets[owner];
        T* slots = reinterpret_cast<T*>(
            quarter_at(all.peers, (all.mode & 16) ? all.peers.rank : owner, Counted::tiles, epoch));
        return slots + slot_row(all.peers.rank, all.offsets[owner + 1] - first, row - first) *
                           this->p.n;
    }

    // Stores to a peer that come faster than the links take them hold up the loads of the other
    // warpgroup's tile; so they are spread over the time that its products take.
    __device__ __forceinline__ void pace(int64_t began, int step, int num_steps) const {
        if (!(all.mode & 128) || owner_of(min(this->m, this->p.m - 1)) == all.peers.rank) return;
        constexpr int kCyclesOfBlock = C::kTileM * C::kTileN * kBlockK / 2048;
        const int64_t until =
            began + int64_t{this->p.num_k_blocks} * (kCyclesOfBlock * 7 / 8) * step / num_steps;
        while (clock64() < until) __nanosleep(40);
    }

    template <typename Sums>
    __device__ __forceinline__ void store(const Sums& sums) const {
        if constexpr (kIsStaged) return store_boxes(sums);
        if (all.mode & 1) {
            store_pairs(sums);
        } else {
            store_rows(sums);
        }
        publish();
    }

    template <typename Sums>
    __device__ __forceinline__ void store_rows(const Sums& sums) const {
        const int64_t began = clock64();
#pragma unroll
        for (int i = 0; i < Base::kRowsOfThread; ++i) {
            if (this->row(i) >= this->p.m) continue;
            T* out = slot_of(this->row(i)) + this->first_column;
#pragma unroll
            for (int q = 0; q < Base::kColumnGroups; ++q) {
                if (!this->has_group(q)) continue;
                *reinterpret_cast<uint4*>(out + q * kPermutedRows) = this->finish(sums, i, q);
                if ((all.mode & 4) && q % 2) comm::fence_system();
                pace(began, i * Base::kColumnGroups + q + 1, Base::kRowsOfThread * Base::kColumnGroups);
            }
            if (all.mode & 2) comm::fence_system();
        }
    }

    // Lanes of an even and the odd row behind it swap halves, so that a warp stores 128 bytes of
    // four rows at once, not 64 of eight.
    template <typename Sums>
    __device__ __forceinline__ void store_pairs(const Sums& sums) const {
        static_assert(Base::kColumnGroups % 2 == 0);
        const bool is_odd = this->lane & 4;
        const int64_t began = clock64();
#pragma unroll
        for (int i = 0; i < Base::kRowsOfThread; ++i) {
            const int even_row = this->row(i) & ~1;
            const int column = this->first_column + (is_odd ? kPermutedRows : 0);
            T* even = even_row < this->p.m ? slot_of(even_row) + column : nullptr;
            T* odd = even_row + 1 < this->p.m ? slot_of(even_row + 1) + column : nullptr;
#pragma unroll
            for (int q = 0; q < Base::kColumnGroups; q += 2) {
                const uint4 left = this->finish(sums, i, q), right = this->finish(sums, i, q + 1);
                const uint4 give = is_odd ? left : right;
                uint4 got;
                got.x = __shfl_xor_sync(0xffffffffu, give.x, 4);
                got.y = __shfl_xor_sync(0xffffffffu, give.y, 4);
                got.z = __shfl_xor_sync(0xffffffffu, give.z, 4);
                got.w = __shfl_xor_sync(0xffffffffu, give.w, 4);
                if (!this->has_group(q + (is_odd ? 1 : 0))) continue;
                if (even) *reinterpret_cast<uint4*>(even + q * kPermutedRows) = is_odd ? got : left;
                if (odd) *reinterpret_cast<uint4*>(odd + q * kPermutedRows) = is_odd ? right : got;
                pace(began, i * Base::kColumnGroups + q + 2, Base::kRowsOfThread * Base::kColumnGroups);
            }
            if (all.mode & 2) comm::fence_system();
        }
    }

    // Counts the tile at every rank that owns some of its rows; pairs with wait_for_tile().
    __device__ __forceinline__ void publish() const {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
        const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
        cutlass::arch::NamedBarrier::arrive_and_wait(kWarpgroupThreads, group);  // all have stored
        if (thread == 0 && this->m < this->p.m) {
            if (!(all.mode & 32)) comm::fence_system();
            count();
        }
        __syncwarp();
    }

    __device__ __forceinline__ void count() const {
        const int last = owner_of(min(this->m + C::kTileM, this->p.m) - 1);
        const int tile = this->m / C::kTileM;
        for (int owner = owner_of(this->m); owner <= last; ++owner) {
            if (all.offsets[owner] == all.offsets[owner + 1]) continue;
            const int index = tile - all.offsets[owner] / C::kTileM;
            comm::add_relaxed(
                counter_at(all.peers, owner, Counted::tiles, epoch, all.peers.rank, index), 1);
        }
    }
};

template <typename C, bool kIsStaged>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_scatter_kernel(const __grid_constant__ ScatterParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& staged = *reinterpret_cast<StagedSmem<C>*>(smem);
    Smem<C>& s = staged.gemm;
    const BandSchedule<C> at(p.bands);
    init_barriers(s);
    wait_for_prior_kernel();
    // Only now: what follows relies on all kernels before this one having ended (sum_rows.cuh).
    release_next_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads) == C::kConsumers) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % kWarpgroupThreads == 0) produce(p.gemm, s, at);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        const uint32_t epoch = comm::this_epoch(p.peers, comm::kSumEpoch);
        comm::wait_for_slots(p.peers, epoch);
        consume(p.gemm, s, at, [&](int m, int n) {
            uint8_t* box = kIsStaged ? staged.boxes[threadIdx.x / 32] : nullptr;
            return ScatterEdge<C, kIsStaged>{{p.gemm, m, n}, p, epoch, box};
        });
    }
    __syncwarp();
    if constexpr (C::kClusterCtas > 1) {  // no CTA leaves while another may still signal it
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
    }
}

}  // namespace bytetx::gemm
