// An all-reduce in two exchanges, with bias, residual and norm: what more than two ranks are worth.
//
//   parts[rank] at the owner of a row = its partial               partial [m, n], f16 or bf16, of
//   each rank h = residual + bias + sum over ranks of parts, rounded, by the owner, to all; sum_out
//   = h out = norm(h), by all
//
// Each rank owns a block of rows. A first kernel sends rows to their owners, the first rows of all
// owners first: the GEMM of one_shot_kernel.cuh, or one of its own behind a product that is there.
// A second one sums up the rows that this rank owns, a warp 512 features, and sends them to all;
// then it norms all rows, in the order in which they come, each in the registers of a warp or of a
// CTA. All of it goes through the staging buffer, so neither exchange has flags or fences, and both
// overlap. Sums are f32 and in the order of ranks; what is normalized is what was sent, so all
// ranks have the same bits. Behind a product that is there half of the SMs norm alone: on one that
// sends, loads wait behind its stores. A staging buffer holds parts [tp_size, rows of an owner,
// n], then sums [m, n]. Bytes over each link: 2 * (tp_size - 1) / tp_size * m * n * 2, where
// everyone's rows to everyone, as in one_shot_rows.cu, take tp_size / 2 times as many; bound by the
// links, for few rows by latency.
#include <algorithm>

#include "comm/comm_tilings.cuh"
#include "comm/staging_row.cuh"
#include "comm/two_shot_unit.cuh"

namespace bytetx {
namespace comm {
namespace {

constexpr int kSendThreads = 512;
constexpr int kInFlight = 8;                       // vectors of a thread
constexpr int kPieceVecs = kInFlight * kWarpSize;  // of a row, that a warp sends at once

// Rows of `count` ranks behind this one (all of them: itself at last), in the order in which they
// become whole: the first row of each, then the second.
struct Turn {
    int peer, index;
    Rows rows;
    bool is_row;  // the peer has that many

    __device__ __forceinline__ Turn(const TwoShotParams& p, int number, int count)
        : peer((p.peers.rank + 1 + number % count) % p.peers.size),
          index(number / count),
          rows(rows_of(p, peer)),
          is_row(index < rows.count) {}
};

// A whole warp: one piece of this rank's part of a row to its owner.
__device__ __forceinline__ void send_piece(const TwoShotParams& p, uint32_t epoch, const Turn& turn,
                                           int piece) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / 8);
    const uint4* from =
        static_cast<const uint4*>(p.own_part) + int64_t{turn.rows.first + turn.index} * num_vecs;
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
        if (v < num_vecs) store_relaxed(to + v, never_zero(words[i]));
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
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize, others = p.peers.size - 1;
    const int pieces = (static_cast<int>(p.norm.hidden_size / 8) + kPieceVecs - 1) / kPieceVecs;
    const auto num_ctas = static_cast<int>(gridDim.x);
    for (int i = warp * num_ctas + static_cast<int>(blockIdx.x);
         i < p.rows_of_owner * others * pieces; i += num_ctas * (kSendThreads / kWarpSize)) {
        const Turn turn(p, i / pieces, others);
        if (turn.is_row) send_piece(p, epoch, turn, i % pieces);
    }
}

// Units or rows in turn. Each warp or CTA has its own; or, where half of them sum first, the next
// that nobody has asked for. All threads of one take at a time, between barriers where it is a CTA.
template <int kThreads>
class InTurn {
  public:
    __device__ __forceinline__ InTurn(const TwoShotParams& p, EpochWord ticket)
        : ticket_(p.has_roles ? p.peers.epochs + ticket : nullptr) {
        const int place = static_cast<int>(threadIdx.x) / kThreads;
        const int places = static_cast<int>(blockDim.x) / kThreads;
        const auto cta = static_cast<int>(blockIdx.x), num_ctas = static_cast<int>(gridDim.x);
        next_ = kThreads <= kWarpSize ? place * num_ctas + cta : cta;
        stride_ = num_ctas * places;
    }

    __device__ __forceinline__ int take() {
        if (ticket_ != nullptr) return ask();
        const int found = next_;
        next_ += stride_;
        return found;
    }

  private:
    __device__ __forceinline__ int ask() {
        if constexpr (kThreads <= kWarpSize) {
            uint32_t found = 0;
            if (threadIdx.x % kWarpSize == 0) found = atomicAdd(ticket_, 1);
            return static_cast<int>(__shfl_sync(0xffffffffu, found, 0));
        } else {
            __shared__ int found;
            __syncthreads();
            if (threadIdx.x == 0) found = static_cast<int>(atomicAdd(ticket_, 1));
            __syncthreads();
            return found;
        }
    }

    uint32_t* ticket_;
    int next_, stride_;
};

template <typename T>
__device__ __forceinline__ void sum_own_rows(const TwoShotParams& p, uint32_t epoch) {
    const int units = (static_cast<int>(p.norm.hidden_size / 8) + kUnitVecs - 1) / kUnitVecs;
    const int count = rows_of(p, p.peers.rank).count * units;
    InTurn<kWarpSize> numbers(p, kUnitTicket);
    for (int i = numbers.take(); i < count; i = numbers.take()) {
        Unit<T> unit(p, epoch, i / units, i % units * kUnitVecs);
        unit.sum();
        unit.send();
    }
}

template <typename Tiling>
using NormParameter =
    std::conditional_t<(Tiling::kVecsPerThread > 2), ParameterReadAgain, RowParameter<Tiling>>;

template <typename T, typename Tiling, RowNorm kNorm>
__device__ __forceinline__ void norm_rows(const TwoShotParams& p, uint32_t epoch) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / 8);
    const NormParameter<Tiling> weight(p.norm.weight, lane, num_vecs);
    const NormParameter<Tiling> bias(p.norm.bias, lane, num_vecs);
    InTurn<Tiling::kThreadsPerRow> numbers(p, kRowOfAllTicket);
    for (int i = numbers.take(); i < p.rows_of_owner * p.peers.size; i = numbers.take()) {
        const Turn turn(p, i, p.peers.size);
        if (!turn.is_row) continue;
        const int row = turn.rows.first + turn.index;
        uint4* first = sum_at(p, p.peers.rank, epoch, row) + lane;
        if (lane == 0) wait_for_word(p.peers, turn.peer, first);
        sync_row<Tiling>();
        RawRow<Tiling> words;
        const bool is_whole = peek<Tiling>(words, first, lane, num_vecs);
        wait_for_row<Tiling>(p.peers, turn.peer, words, is_whole, first, lane, num_vecs);
        clear_inbox<Tiling>(first, lane, num_vecs);
        store_words<Tiling>(words.words, lane, row, num_vecs,
                            {p.norm.sum_out, nullptr, nullptr, false});
        RowRegisters<T, Tiling> h;
        clear_row<T, Tiling>(h);
        add_row<T, Tiling>(h, words);
        store_normalized_row<T, Tiling, kNorm>(h, lane, row, weight, bias, p.norm.hidden_size,
                                               p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
}

// On an SM that sends, loads wait behind its stores: of many rows, every other one norms alone.
__device__ __forceinline__ bool sums_first(const TwoShotParams& p) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return !p.has_roles || sm % 2 == 0;
}

// By the last CTA to come here: all have asked for the last time.
__device__ __forceinline__ void put_tickets_back(const TwoShotParams& p) {
    __syncthreads();
    if (threadIdx.x != 0 || !is_last_cta(p.peers, kTwoShotTicket)) return;
    p.peers.epochs[kUnitTicket] = 0;
    p.peers.epochs[kRowOfAllTicket] = 0;
}

template <typename Tiling>
constexpr int kTwoShotCtasOfSm = Tiling::kVecsPerThread <= 6 ? 2 : 1;

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(Tiling::kCtaThreads, kTwoShotCtasOfSm<Tiling>)
    two_shot_kernel(const __grid_constant__ TwoShotParams p) {
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    const bool ends_call = is_last_to_start(p);
    if (sums_first(p)) sum_own_rows<T>(p, epoch);
    norm_rows<T, Tiling, kNorm>(p, epoch);
    if (p.has_roles) put_tickets_back(p);
    wait_for_prior_kernel();
    if (ends_call) end_sum(p, epoch);
}

// All CTAs are there at once: others' rows, for which each waits, may wait for what all of these
// send.
template <typename T, typename Tiling, RowNorm kNorm>
void launch_rows(const TwoShotParams& p, cudaStream_t stream) {
    const auto kernel = two_shot_kernel<T, Tiling, kNorm>;
    int device;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    static const int64_t resident = resident_ctas(kernel, Tiling::kCtaThreads, 0, device);
    const int64_t rows = (p.shape.num_rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
    const int64_t units = (p.norm.hidden_size / 8 + kUnitVecs - 1) / kUnitVecs;
    const int64_t ctas = std::max(rows, (p.rows_of_owner * units + 3) / 4);
    const int64_t most = p.own_part != nullptr ? resident - kSendingCtas : resident;
    const auto grid = static_cast<unsigned>(std::min(ctas, most));
    // Behind the GEMM that sends its tiles itself, parts come at once, and all sum. Where CTAs are
    // more than half of the SMs hold, some are on the others.
    TwoShotParams with_roles = p;
    with_roles.has_roles = p.own_part != nullptr && 2 * int64_t{grid} > resident;
    launch_kernel(kernel, {dim3(grid), dim3(Tiling::kCtaThreads), 0, stream}, with_roles);
}

TwoShotParams make_params(const GemmSumParams& o, const void* own_part) {
    const SumShape shape{.num_rows = static_cast<int>(o.linear.m)};
    return {{o.norm, o.bias, make_peers(o.peers), shape},
            own_part,
            static_cast<int>(rows_of_owner(o.linear.m, o.peers.size)),
            false};
}

}  // namespace

void check_two_shot(const char* op, const GemmSumParams& p) {
    const int64_t m = p.linear.m, size = std::max(p.peers.size, 1);
    check_sum(op, p, size * rows_of_owner(m, size) + m, m, staging_bytes(p.peers));
    if (p.norm.sum_out == nullptr) {
        throw std::invalid_argument(std::string(op) + " norms what it has sent: it needs sum_out");
    }
}

void launch_two_shot(const GemmSumParams& o, const void* own_part, cudaStream_t stream) {
    const TwoShotParams p = make_params(o, own_part);
    dispatch_sum(o, [&]<typename T, typename Tiling, RowNorm kNorm>() {
        launch_rows<T, Tiling, kNorm>(p, stream);
    });
}

}  // namespace comm

void all_reduce_two_shot(const GemmSumParams& p, const Launch& launch) {
    comm::check_two_shot("all_reduce_two_shot", p);
    if (p.linear.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    launch_kernel(
        comm::send_rows_kernel,
        {dim3(comm::kSendingCtas), dim3(comm::kSendThreads), 0, stream, comm::kSendingCluster},
        comm::make_params(p, p.linear.residual));
    comm::launch_two_shot(p, p.linear.residual, stream);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
