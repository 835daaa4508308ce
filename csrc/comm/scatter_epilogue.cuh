// The epilogue of a GEMM that stores its tiles to the ranks that sum them.
//
// A tile's rows are stored, 16 bytes a thread, into this rank's slot in the memory of their owner
// or of every rank. When all stores have been performed, the tile is counted there. Tiles begin
// with the rows of the next rank and end with this rank's own, so that no two ranks write to the
// same one at a time.
#pragma once

#include "comm/peers.cuh"
#include "gemm/linear_epilogue.cuh"
#include "gemm/producers.cuh"

namespace bytetx::gemm {

using comm::Counted;

struct ScatterInputs : LinearInputs {  // residual: partial
    comm::Peers peers;
    int offsets[kMaxPeers + 1];  // offsets of the ranks' rows
    bool to_all_ranks;           // every rank sums every row
};

// The row of the slots where rank `source` puts its part of `row`.
__device__ __forceinline__ int64_t slot_row(int source, int num_rows, int row) {
    return int64_t{source} * num_rows + row;
}

template <typename C>
struct ScatterEpilogue : LinearEpilogue<C, ActivationForm::linear, false> {
    using Inputs = ScatterInputs;
    using Base = LinearEpilogue<C, ActivationForm::linear, false>;
    using T = typename C::Element;
    static constexpr bool kWaitsFirst = true;
    // The next kernel relies on all kernels before this one having ended.
    static constexpr bool kReleasesLate = true;
    const ScatterInputs& all;

    template <typename K>
    __device__ __forceinline__ ScatterEpilogue(const K& k, int m, int n, int round)
        : Base(k, m, n, round), all(k.p.epilogue) {}

    template <typename K>
    static __device__ __forceinline__ void before_tiles(const K& k) {
        const comm::Peers& peers = k.p.epilogue.peers;
        comm::wait_for_slots(peers, comm::this_epoch(peers, comm::kSumEpoch));
    }

    // The partial sums alone: bias and residual belong to the sum over ranks.
    template <typename Accumulators, typename Wait>
    __device__ __forceinline__ void begin(Accumulators& sums, const Wait& wait) const {
        wait();
        sums.clear();
        if (this->in.residual != nullptr) this->add_residual(sums);
    }

    __device__ __forceinline__ int owner_of(int row) const {
        int owner = 0;
        while (row >= all.offsets[owner + 1]) ++owner;
        return owner;
    }

    // visit(reader, first, count) for every rank that sums `row`; it sums the `count` rows from
    // `first` on.
    template <typename Visit>
    __device__ __forceinline__ void each_reader(int row, const Visit& visit) const {
        if (!all.to_all_ranks) {
            const int owner = owner_of(row), first = all.offsets[owner];
            return visit(owner, first, all.offsets[owner + 1] - first);
        }
        for (int step = 1; step <= all.peers.size; ++step) {  // this rank last
            visit((all.peers.rank + step) % all.peers.size, 0, this->p.m);
        }
    }

    template <typename Accumulators>
    __device__ __forceinline__ void finish(const Accumulators& sums) const {
        // Read here, not kept in a register through the products.
        const uint32_t epoch = comm::this_epoch(all.peers, comm::kSumEpoch);
#pragma unroll
        for (int i = 0; i < Base::kRowsOfThread; ++i) {
            const int row = this->row(i);
            if (row >= this->p.m) continue;
            each_reader(row, [&](int reader, int first, int count) {
                auto* slots =
                    reinterpret_cast<T*>(quarter_at(all.peers, reader, Counted::tiles, epoch));
                T* out = slots + slot_row(all.peers.rank, count, row - first) * this->p.n +
                         this->first_column;
#pragma unroll
                for (int q = 0; q < Base::kColumnGroups; ++q) {
                    if (!this->has_group(q)) continue;
                    *reinterpret_cast<uint4*>(out + q * kPermutedRows) = this->rounded(sums, i, q);
                }
            });
        }
        publish(epoch);
    }

    // Counts the tile at every rank that sums some of its rows; pairs with wait_for_tiles().
    __device__ __forceinline__ void publish(uint32_t epoch) const {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
        const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
        sync_threads_of(kWarpgroupThreads, group);  // all have stored
        if (thread == 0 && this->m < this->p.m) {
            comm::fence_system();
            const int end = min(this->m + C::kTileM, this->p.m);
            for (int row = this->m; row < end;) {
                int last = end;  // end of the rows of the same readers
                each_reader(row, [&](int reader, int first, int count) {
                    const int tile = this->m / C::kTileM - first / C::kTileM;
                    comm::add_relaxed(
                        counter_at(all.peers, reader, Counted::tiles, epoch, all.peers.rank, tile),
                        1);
                    last = first + count;
                });
                row = last;
            }
        }
        __syncwarp();
    }
};

// A thread of the grid: announces that this call has begun.
template <typename K>
__device__ __forceinline__ void begin_sum(const K& k) {
    const comm::Peers& peers = k.p.epilogue.peers;
    if (blockIdx.x == 0) comm::begin_sum(peers, comm::this_epoch(peers, comm::kSumEpoch));
}

template <typename C>
struct ScatterProducer : ProducerDefaults {
    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int thread) {
        DenseProducer<C>::run(k, thread);
        if (thread == 32) begin_sum(k);
    }
};

}  // namespace bytetx::gemm
