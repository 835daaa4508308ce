// The producer of a GEMM over rows that arrive while it runs.
//
// One more thread of each CTA sends chunks of this rank's rows through shared memory to the other
// ranks' buffers (bulk copies in and out), first to the rank that needs them first, and counts each
// chunk there. The producer waits for the counters of a tile's rows before it loads them. Tiles
// begin with the rank's own rows, which are read in place, and continue in the order of arrival.
#pragma once

#include "comm/peers.cuh"
#include "gemm/producers.cuh"

namespace bytetx::gemm {

using comm::Counted;

constexpr int kChunkBytes = 8192;  // bytes per bulk copy
constexpr int kChunksInFlight = 3;
constexpr int kPieceRows = 128;  // rows that are counted together, from the owner's first on

struct GatherInputs {
    CUtensorMap gathered[2];  // {k, m}, for even and odd calls; the problem's a: this rank's rows
    comm::Peers peers;
    const uint8_t* own_rows;
    int offsets[kMaxPeers + 1];
    int row_bytes;
    int chunks_of_piece, own_chunks;
    bool sends_to_self;  // some tile has rows of this rank and of another
};

struct GatherSmem {
    alignas(128) uint8_t chunks[kChunksInFlight][kChunkBytes];
    uint64_t arrived[kChunksInFlight];
};

__device__ __forceinline__ int num_rows(const GatherInputs& p, int rank) {
    return p.offsets[rank + 1] - p.offsets[rank];
}

// Chunks of `rows` rows from a piece's first on.
__host__ __device__ __forceinline__ int chunks_of(const GatherInputs& p, int rows) {
    const int64_t bytes = int64_t{rows} * p.row_bytes;
    return static_cast<int>((bytes + kChunkBytes - 1) / kChunkBytes);
}

// Until rows [first, last) of all ranks' rows lie in this rank's buffer. One thread.
__device__ __forceinline__ void wait_for_rows(const GatherInputs& p, uint32_t epoch, int first,
                                              int last) {
    for (int source = 0; source < p.peers.size; ++source) {
        const int begin = max(first, p.offsets[source]) - p.offsets[source];
        const int end = min(last, p.offsets[source + 1]) - p.offsets[source];
        for (int piece = begin / kPieceRows; piece * kPieceRows < end && begin < end; ++piece) {
            const int rows = min(kPieceRows, num_rows(p, source) - piece * kPieceRows);
            comm::wait_for(
                p.peers, source,
                comm::counter_at(p.peers, p.peers.rank, Counted::pieces, epoch, source, piece),
                chunks_of(p, rows));
        }
    }
    comm::fence_proxies();  // loads by TMA follow
}

template <typename C, typename K>
__device__ __forceinline__ void fetch_gathered(const K& k) {
    auto& [p, s, at] = k;
    const GatherInputs& in = p.producer;
    const uint32_t epoch = comm::this_epoch(in.peers, comm::kGatherEpoch);
    const int own_first = in.offsets[in.peers.rank], own_last = in.offsets[in.peers.rank + 1];
    auto ring = s.stages.first(p.stages);
    for (int tile = at.cluster; at.has(tile); tile += at.num_clusters) {
        const int m = at.tile_m(tile), n = at.tile_n(tile);
        const int last = min(m + C::kTileM, p.m);
        const bool is_own = m >= own_first && last <= own_last;
        if (!is_own) wait_for_rows(in, epoch, m, last);
        const CUtensorMap* a = is_own ? &p.a : &in.gathered[epoch & 1];
        const int row = is_own ? m - own_first : m;
        fetch_blocks<C>(k, ring, [&](int stage, int feature) {
            fetch_a<C>(a, s, stage, feature, row);
            fetch_b<C>(p, s, stage, at.rank, feature, n);
        });
    }
}

// A chunk of this rank's rows and the peer it is sent to. The rank before this one needs the rows
// first; this one itself needs them last.
struct Chunk {
    int peer, index;

    __device__ __forceinline__ explicit Chunk(const GatherInputs& p)
        : peer(p.peers.rank), index(blockIdx.x) {
        next_peer(p);
    }
    __device__ __forceinline__ void next_peer(const GatherInputs& p) {
        peer = (peer == 0 ? p.peers.size : peer) - 1;
    }
    __device__ __forceinline__ void advance(const GatherInputs& p) {
        index += static_cast<int>(gridDim.x);
        if (index < p.own_chunks) return;
        index = static_cast<int>(blockIdx.x);
        next_peer(p);
    }
    __device__ __forceinline__ int piece(const GatherInputs& p) const {
        return index / p.chunks_of_piece;
    }
    // Bytes from this rank's first row on.
    __device__ __forceinline__ int64_t offset(const GatherInputs& p) const {
        const int whole = piece(p);
        return int64_t{whole} * kPieceRows * p.row_bytes +
               int64_t{index - whole * p.chunks_of_piece} * kChunkBytes;
    }
    // The last chunk of a piece ends with its rows.
    __device__ __forceinline__ int num_bytes(const GatherInputs& p, int64_t offset) const {
        const int rows = min((piece(p) + 1) * kPieceRows, num_rows(p, p.peers.rank));
        return static_cast<int>(min(int64_t{kChunkBytes}, int64_t{rows} * p.row_bytes - offset));
    }
};

// Tells all ranks that the gathered rows of the call before the last are no longer read.
__device__ __forceinline__ void announce(const GatherInputs& p) {
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kGatherEpoch);
    for (int peer = 0; peer < p.peers.size; ++peer) {
        comm::store_release(p.peers.flags[peer] + comm::kStarted + p.peers.rank, epoch);
    }
}

// Until all but kLeft of the thread's bulk stores have been performed where they go.
template <int kLeft>
__device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
    comm::fence_proxies();
}

template <typename S>
__device__ __forceinline__ void load_chunk(const GatherInputs& p, S& s, int slot, const Chunk& c) {
    const int64_t offset = c.offset(p);
    const int num_bytes = c.num_bytes(p, offset);
    FullBarrier::arrive_and_expect(&s.arrived[slot], num_bytes);
    load_bytes(p.own_rows + offset, &s.arrived[slot], s.chunks[slot], num_bytes);
}

template <typename S>
__device__ __forceinline__ void store_chunk(const GatherInputs& p, S& s, int slot, const Chunk& c,
                                            uint32_t epoch) {
    // The peer reads this parity's rows in its call before the last; pairs with announce().
    if (c.index == static_cast<int>(blockIdx.x)) {
        comm::wait_for(p.peers, c.peer, p.peers.flags[p.peers.rank] + comm::kStarted + c.peer,
                       epoch - 1);
    }
    const int64_t offset = c.offset(p);
    uint8_t* rows = comm::quarter_at(p.peers, c.peer, Counted::pieces, epoch) +
                    int64_t{p.offsets[p.peers.rank]} * p.row_bytes;
    store_bytes(s.chunks[slot], rows + offset, c.num_bytes(p, offset));
    commit_stores();
}

__device__ __forceinline__ uint32_t* counter_of(const GatherInputs& p, const Chunk& c,
                                                uint32_t epoch) {
    return comm::counter_at(p.peers, c.peer, Counted::pieces, epoch, p.peers.rank, c.piece(p));
}

// Counts a chunk that has been written; pairs with wait_for_rows().
__device__ __forceinline__ void count_chunk(const GatherInputs& p, const Chunk& c, uint32_t epoch) {
    comm::add_release(counter_of(p, c, epoch), 1);
}

// Sends the CTA's chunks to all peers at once, where each chunk has a slot: with few rows, latency
// matters.
template <typename S>
__device__ __forceinline__ void send_few_chunks(const GatherInputs& p, S& s, int num_chunks,
                                                int num_peers) {
    const auto each = [&](const auto& visit) {
        Chunk chunk(p);
#pragma unroll 1
        for (int i = 0, slot = 0; i < num_chunks * num_peers; ++i, chunk.advance(p)) {
            visit(chunk, slot);
            slot = slot + 1 == num_chunks ? 0 : slot + 1;
        }
    };
    Chunk loaded(p);
#pragma unroll 1
    for (int slot = 0; slot < num_chunks; ++slot, loaded.advance(p)) load_chunk(p, s, slot, loaded);
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kGatherEpoch);
    each([&](const Chunk& chunk, int slot) {
        FullBarrier::wait(&s.arrived[slot], 0);
        store_chunk(p, s, slot, chunk, epoch);
    });
    wait_for_stores<0>();
    comm::fence_system();
    each([&](const Chunk& chunk, int) { comm::add_relaxed(counter_of(p, chunk, epoch), 1); });
}

// One thread: sends this CTA's chunks of this rank's rows to every peer.
template <typename S>
__device__ __forceinline__ void send_rows(const GatherInputs& p, S& s) {
    const int mine =
        (p.own_chunks - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
        static_cast<int>(gridDim.x);
    const int num_peers = p.peers.size - (p.sends_to_self ? 0 : 1), total = mine * num_peers;
    if (total <= 0) return;
    if (mine <= kChunksInFlight) return send_few_chunks(p, s, mine, num_peers);
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kGatherEpoch);
    Chunk loaded(p), stored(p), counted(p);
    RingIndex<kChunksInFlight> ring;
    int left_to_load = total;
#pragma unroll 1
    for (int slot = 0; slot < kChunksInFlight && left_to_load > 0; ++slot, --left_to_load) {
        load_chunk(p, s, slot, loaded);
        loaded.advance(p);
    }
    int before = 0;  // the slot of the chunk before
    for (int left = total; left > 0; --left) {
        FullBarrier::wait(&s.arrived[ring.index], ring.phase);
        store_chunk(p, s, ring.index, stored, epoch);
        stored.advance(p);
        if (left < total) {
            wait_for_stores<1>();
            count_chunk(p, counted, epoch);
            counted.advance(p);
            if (left_to_load > 0) {
                load_chunk(p, s, before, loaded);
                loaded.advance(p);
                --left_to_load;
            }
        }
        before = ring.index;
        ring.advance();
    }
    wait_for_stores<0>();
    count_chunk(p, counted, epoch);
}

// One CTA, when all others have ended: no rank counts for this call any more.
__device__ __forceinline__ void end_gather(const GatherInputs& p) {
    const int rank = p.peers.rank;
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kGatherEpoch);
    for (int source = 0; source < p.peers.size; ++source) {
        const int pieces = (num_rows(p, source) + kPieceRows - 1) / kPieceRows;
        for (int i = 0; i < pieces; ++i) {
            *comm::counter_at(p.peers, rank, Counted::pieces, epoch, source, i) = 0;
        }
    }
    p.peers.epochs[comm::kGatherEpoch] = epoch;
}

// Thread 0 fetches, one more sends this rank's rows, one says that the call has begun.
template <typename C>
struct GatherProducer : ProducerDefaults {
    using Inputs = GatherInputs;
    using Smem = GatherSmem;
    static constexpr bool kWaitsFirst = true;

    template <typename K>
    static __device__ __forceinline__ void init_barriers(const K& k) {
        for (int i = 0; i < kChunksInFlight; ++i) {
            FullBarrier::init(&k.s.producer.arrived[i], 1);
        }
    }

    template <typename K>
    static __device__ __forceinline__ void run(const K& k, int thread) {
        if (thread == 0) {
            fetch_gathered<C>(k);
        } else if (thread == 32) {
            send_rows(k.p.producer, k.s.producer);
        } else if (thread == 64 && blockIdx.x == 0) {
            announce(k.p.producer);
        }
    }

    template <typename K>
    static __device__ __forceinline__ void end(const K& k) {
        __syncthreads();
        if (threadIdx.x == 0 && comm::is_last_cta(k.p.producer.peers, comm::kGatherTicket)) {
            end_gather(k.p.producer);
        }
    }
};

}  // namespace bytetx::gemm
