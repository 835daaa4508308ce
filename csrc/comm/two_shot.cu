// The all-reduce behind a GEMM that stores nothing elsewhere, in two exchanges, with bias, residual and
// norm: what more than two ranks, or more than some hundred rows, are worth.
//
//   parts[rank] at the owner of a row = its partial               partial [m, n], f16 or bf16, of each rank
//   h = residual + bias + sum over ranks of parts, rounded, by the owner, to all;  sum_out = h
//   out = norm(h), by all
//
// Each rank owns a block of rows. A first kernel sends rows to their owners, a warp a piece, the first
// rows of all owners first; a second one sums up and sends the rows that this rank owns, then norms
// those of the others: a CTA a row, whose operands a warp of its own fetches into a ring (sum_ring.cuh).
// Rows are counted where they come, one by one, so that both exchanges overlap. Sums are f32 and in the
// order of ranks; what is normed is what was sent, so all ranks have the same bits.
// Bytes over each link: 2 * (tp_size - 1) / tp_size * m * n * 2, where everyone's rows to everyone, as in
// push_rows.cu, take tp_size / 2 times as many; bound by the links, for few rows by latency.
#include <algorithm>
#include <type_traits>

#include "comm/comm_tilings.cuh"
#include "comm/sum_ring.cuh"

namespace bytetx {
namespace {

using namespace comm;

constexpr int kSendThreads = 512;
constexpr int kInFlight = 8;  // vectors of a thread
constexpr int kPieceVecs = kInFlight * kWarpSize;  // of a row, that a warp sends at once

struct TwoShotParams : RingSumParams {
    const void* partial;
    int rows_of_owner;  // of each but the last ones
};

struct Rows {
    int first, count;
};

__device__ __forceinline__ Rows rows_of(const TwoShotParams& p, int owner) {
    const int first = min(owner * p.rows_of_owner, p.shape.num_rows);
    return {first, min(p.rows_of_owner, p.shape.num_rows - first)};
}

// In a rank's slots: all ranks' parts of the rows that it owns, then all rows' sums. In vectors.
__device__ __forceinline__ uint4* part_at(const TwoShotParams& p, int owner, uint32_t epoch,
                                          int source, int index) {
    auto* slots = reinterpret_cast<uint4*>(quarter_at(p.peers, owner, Counted::tiles, epoch));
    const int64_t row = int64_t{source} * p.rows_of_owner + index;
    return slots + row * (p.norm.hidden_size / 8);
}
__device__ __forceinline__ uint4* sum_at(const TwoShotParams& p, int reader, uint32_t epoch,
                                         int row) {
    return part_at(p, reader, epoch, p.peers.size, row);
}

__device__ __forceinline__ int num_pieces(const TwoShotParams& p) {
    return (static_cast<int>(p.norm.hidden_size / 8) + kPieceVecs - 1) / kPieceVecs;
}

// Counters of a source: of its parts of the reader's rows, by pieces, then of its own rows' sums.
__device__ __forceinline__ uint32_t* part_counter(const TwoShotParams& p, int owner, uint32_t epoch,
                                                  int source, int index) {
    return counter_at(p.peers, owner, Counted::tiles, epoch, source, index);
}
__device__ __forceinline__ uint32_t* sum_counter(const TwoShotParams& p, int reader, uint32_t epoch,
                                                 int owner, int index) {
    return counter_at(p.peers, reader, Counted::tiles, epoch, owner, p.rows_of_owner + index);
}

// Work that concerns the others' rows, in the order in which these become whole: the first row of
// every other rank, then the second.
struct Turn {
    int peer, index;
    Rows rows;
    bool is_row;  // the peer has that many

    __device__ __forceinline__ Turn(const TwoShotParams& p, int number)
        : peer((p.peers.rank + 1 + number % (p.peers.size - 1)) % p.peers.size),
          index(number / (p.peers.size - 1)),
          rows(rows_of(p, peer)),
          is_row(index < rows.count) {}
};

__device__ __forceinline__ int num_turns(const TwoShotParams& p) {
    return p.rows_of_owner * (p.peers.size - 1);
}

// A whole warp: one piece of this rank's part of a row to its owner.
__device__ __forceinline__ void send_piece(const TwoShotParams& p, uint32_t epoch, const Turn& turn,
                                           int piece) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / 8);
    const uint4* from = static_cast<const uint4*>(p.partial) +
                        int64_t{turn.rows.first + turn.index} * num_vecs;
    uint4* to = part_at(p, turn.peer, epoch, p.peers.rank, turn.index);
    const int first = piece * kPieceVecs + lane;
    uint4 words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
        words[i] = __ldcg(from + min(first + i * kWarpSize, num_vecs - 1));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
        const int v = first + i * kWarpSize;
        if (v < num_vecs) to[v] = words[i];
    }
    __syncwarp();
    if (lane == 0) {
        fence_system();
        add_relaxed(part_counter(p, turn.peer, epoch, p.peers.rank, turn.index), 1);
    }
}

__global__ void __launch_bounds__(kSendThreads)
    send_rows_kernel(const __grid_constant__ TwoShotParams p) {
    wait_for_prior_kernel();
    // Only now: what follows relies on all kernels before this one having ended (sum_rows.cuh).
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    if (blockIdx.x == 0 && threadIdx.x == kWarpSize) begin_sum(p.peers, epoch);
    __syncwarp();
    wait_for_slots(p.peers, epoch);
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize, pieces = num_pieces(p);
    const auto num_ctas = static_cast<int>(gridDim.x);
    for (int i = warp * num_ctas + static_cast<int>(blockIdx.x); i < num_turns(p) * pieces;
         i += num_ctas * (kSendThreads / kWarpSize)) {
        const Turn turn(p, i / pieces);
        if (turn.is_row) send_piece(p, epoch, turn, i % pieces);
    }
}

// One warp: what the CTA's rows need.
__device__ __forceinline__ void fetch_rows(const TwoShotParams& p, const Ring& ring,
                                           uint32_t epoch) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, rank = p.peers.rank;
    const Rows own = rows_of(p, rank);
    const auto expected = static_cast<uint32_t>(num_pieces(p));
    RingFetcher fetcher(p, ring);
    fence_proxies();  // residuals are what kernels before the GEMM have stored
    for (auto i = static_cast<int>(blockIdx.x); i < own.count; i += static_cast<int>(gridDim.x)) {
        if (p.norm.residual != nullptr) fetcher.fetch(p.norm.residual, own.first + i, 1);
        if (lane < p.peers.size && lane != rank) {
            wait_for(p.peers, lane, part_counter(p, rank, epoch, lane, i), expected);
        }
        __syncwarp();
        fence_proxies();  // what follows are bulk copies
        for (int source = 0; source < p.peers.size; ++source) {
            if (source == rank) {
                fetcher.fetch(p.partial, own.first + i, 1);
            } else {
                fetcher.fetch(part_at(p, rank, epoch, source, i), 0, 1);
            }
        }
    }
    for (auto i = static_cast<int>(blockIdx.x); i < num_turns(p); i += static_cast<int>(gridDim.x)) {
        const Turn turn(p, i);
        if (!turn.is_row) continue;
        if (lane == 0) {
            wait_for(p.peers, turn.peer, sum_counter(p, rank, epoch, turn.peer, turn.index), 1);
        }
        __syncwarp();
        fence_proxies();
        fetcher.fetch(sum_at(p, rank, epoch, turn.rows.first + turn.index), 0, 1);
    }
}

// h as it is sent, to every rank and to sum_out; all summing threads of the CTA.
template <typename T, typename Tiling>
__device__ __forceinline__ void send_sum(const TwoShotParams& p, uint32_t epoch, const Rows& own,
                                         int index, int lane, int num_vecs,
                                         RowRegisters<T, Tiling>& h) {
    RawRow<Tiling> sums;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) sums.words[i] = pack<T>(h[i]);
    clear_row<T, Tiling>(h);
    add_row<T, Tiling>(h, sums);
    const int row = own.first + index;
    const auto store = [&](uint4* to) {
#pragma unroll
        for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
            const int v = lane + i * Tiling::kThreadsPerRow;
            if (v < num_vecs) to[v] = sums.words[i];
        }
    };
    for (int turn = 1; turn < p.peers.size; ++turn) {
        store(sum_at(p, (p.peers.rank + turn) % p.peers.size, epoch, row));
    }
    sync_threads<Tiling::kCtaThreads>();
    if (threadIdx.x < kWarpSize) {
        const int peer = static_cast<int>(threadIdx.x);
        if (peer < p.peers.size && peer != p.peers.rank) {
            fence_system();
            add_relaxed(sum_counter(p, peer, epoch, p.peers.rank, index), 1);
        }
        __syncwarp();
    }
    store(static_cast<uint4*>(p.norm.sum_out) + int64_t{row} * num_vecs);
}

template <typename T, typename Tiling, RowNorm kNorm>
__device__ __forceinline__ void sum_rows(const TwoShotParams& p, const Ring& ring, uint32_t epoch) {
    const auto lane = static_cast<int>(threadIdx.x);
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    const RowParameter<Tiling> weight(p.norm.weight, lane, num_vecs);
    const RowParameter<Tiling> norm_bias(p.norm.bias, lane, num_vecs);
    const RowParameter<Tiling> bias(p.bias, lane, num_vecs);
    AnyRingIndex slot{p.num_slots};
    const auto norm = [&](RowRegisters<T, Tiling>& h, int row) {
        store_normed_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                           p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    };
    const Rows own = rows_of(p, p.peers.rank);
    for (auto i = static_cast<int>(blockIdx.x); i < own.count; i += static_cast<int>(gridDim.x)) {
        RowRegisters<T, Tiling> h;
        add_slots<T, Tiling>(p, ring, bias, slot, lane, num_vecs, h);
        send_sum<T, Tiling>(p, epoch, own, i, lane, num_vecs, h);
        norm(h, own.first + i);
    }
    for (auto i = static_cast<int>(blockIdx.x); i < num_turns(p); i += static_cast<int>(gridDim.x)) {
        const Turn turn(p, i);
        if (!turn.is_row) continue;
        const int row = turn.rows.first + turn.index;
        RowRegisters<T, Tiling> h;
        clear_row<T, Tiling>(h);
        add_row<T, Tiling>(h, take_slot<Tiling>(p, ring, slot, lane, num_vecs));
        store_row<T, Tiling>(p.norm.sum_out, h, lane, row, num_vecs);
        norm(h, row);
    }
}

// CTAs of an SM, whose registers hold what is sent beside the sums.
template <typename Tiling>
constexpr int kTwoShotCtasOfSm = Tiling::kVecsPerThread == 1   ? 3
                                 : Tiling::kVecsPerThread == 2 ? 2
                                                               : 1;

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(kRingThreads<Tiling>, kTwoShotCtasOfSm<Tiling>)
    two_shot_kernel(const __grid_constant__ TwoShotParams p) {
    const Ring ring = make_ring<Tiling>(p);
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    const bool ends_call = is_last_to_start(p);
    __syncthreads();
    if (threadIdx.x >= Tiling::kCtaThreads) {
        fetch_rows(p, ring, epoch);
    } else {
        sum_rows<T, Tiling, kNorm>(p, ring, epoch);
    }
    wait_for_prior_kernel();
    if (ends_call) end_sum(p, epoch);
}

// A CTA a row, however short: few rows are a rank's own.
template <typename Tiling>
using CtaTiling = std::conditional_t<Tiling::kThreadsPerRow <= kWarpSize,
                                     RowTiling<kCtaThreads, 1, 1>, Tiling>;

}  // namespace

void all_reduce_two_shot(const GemmSumParams& p, const Launch& launch) {
    const LinearParams& o = p.linear;
    const int64_t size = std::max(p.peers.size, 1), rows_of_owner = (o.m + size - 1) / size;
    check_sum("all_reduce_two_shot", p, size * rows_of_owner + o.m, o.m, p.peers.buffer_bytes / 4);
    if (p.norm.sum_out == nullptr) {
        throw std::invalid_argument("all_reduce_two_shot norms what it has sent: it needs sum_out");
    }
    if (o.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    const SumShape shape{.num_rows = static_cast<int>(o.m),
                         .num_tiles = 2 * static_cast<int>(rows_of_owner)};
    const TwoShotParams params{{{p.norm, p.bias, make_peers(p.peers), shape}, 0, 0},
                               o.residual,
                               static_cast<int>(rows_of_owner)};
    check_counters(params, p.peers.num_flags);
    launch_kernel(send_rows_kernel,
                  {dim3(kSendingCtas), dim3(kSendThreads), 0, stream, kSendingCluster}, params);
    dispatch_sum(p, [&]<typename T, typename Tiling, RowNorm kNorm>() {
        using Wide = CtaTiling<Tiling>;
        launch_ring<T, Wide, two_shot_kernel<T, Wide, kNorm>>(params, o.m, stream);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
