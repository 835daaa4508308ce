// An all-reduce with two exchanges, with bias, residual and norm: for more than two ranks.
//
//   every rank: part -> owner of the row                         part [m, n], f16 or bf16
//   owner:      h = residual + bias + sum over ranks of parts, rounded -> every rank
//   every rank: sum_out = h; out = norm(h)
//
// Each rank owns a block of rows. A first kernel sends rows to their owners, the first rows of all
// owners first: the GEMM of one_shot_epilogue.cuh, or send_rows_kernel after another GEMM. A second
// kernel sums the rows that this rank owns, 512 features a warp, and sends them to all; then it
// normalizes all rows, in the order in which they arrive, each in the registers of a warp or of a
// CTA. All of it goes through the staging buffer, so neither exchange has flags or fences, and both
// overlap. Sums are f32 and in the order of ranks; the norm takes what was sent, so all ranks have
// the same bits. After another GEMM, half of the SMs only normalize: on an SM that sends, loads
// wait behind its stores. A staging buffer holds parts [tp_size, rows of an owner, n], then sums
// [m, n]. Bytes over each link: 2 * (tp_size - 1) / tp_size * m * n * 2, where one exchange
// (one_shot_rows.cu) takes tp_size / 2 times as many; bound by the links, for few rows by latency.
#include <algorithm>

#include "comm/comm_tilings.cuh"
#include "comm/staging_row.cuh"
#include "comm/two_shot_unit.cuh"

namespace bytetx {
namespace comm {
namespace {

constexpr int kSendThreads = 512;
constexpr int kInFlight = 8;                       // vectors of a thread
constexpr int kPieceVecs = kInFlight * kWarpSize;  // vectors of a row that a warp sends at once

// A row of one of the `count` ranks after this one (all of them: this rank last), in the order in
// which rows become complete: the first row of each rank, then the second.
struct RowOfPeer {
    int peer, index;
    Rows rows;
    bool exists;  // the peer owns that many rows

    __device__ __forceinline__ RowOfPeer(const TwoShotParams& p, int number, int count)
        : peer((p.peers.rank + 1 + number % count) % p.peers.size),
          index(number / count),
          rows(rows_of(p, peer)),
          exists(index < rows.count) {}
};

// A whole warp: sends one piece of this rank's part of a row to its owner.
__device__ __forceinline__ void send_piece(const TwoShotParams& p, uint32_t epoch,
                                           const RowOfPeer& at, int piece) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / 8);
    const uint4* from =
        static_cast<const uint4*>(p.own_part) + int64_t{at.rows.first + at.index} * num_vecs;
    uint4* to = part_at(p, at.peer, epoch, p.peers.rank, at.index);
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
    // Not earlier: the next kernel relies on all kernels before this one having ended.
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
        const RowOfPeer at(p, i / pieces, others);
        if (at.exists) send_piece(p, epoch, at, i % pieces);
    }
}

// Hands out units or rows: each warp or CTA has its own or, where half of them sum first, takes the
// next one that is left. All threads of a warp or CTA call take() together.
template <int kThreads>
class WorkQueue {
  public:
    __device__ __forceinline__ WorkQueue(const TwoShotParams& p, EpochWord ticket)
        : ticket_(p.has_roles ? p.peers.epochs + ticket : nullptr) {
        const int place = static_cast<int>(threadIdx.x) / kThreads;
        const int places = static_cast<int>(blockDim.x) / kThreads;
        const auto cta = static_cast<int>(blockIdx.x), num_ctas = static_cast<int>(gridDim.x);
        next_ = kThreads <= kWarpSize ? place * num_ctas + cta : cta;
        stride_ = num_ctas * places;
    }

    __device__ __forceinline__ int take() {
        if (ticket_ != nullptr) return take_ticket();
        const int found = next_;
        next_ += stride_;
        return found;
    }

  private:
    __device__ __forceinline__ int take_ticket() {
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
    WorkQueue<kWarpSize> numbers(p, kUnitTicket);
    for (int i = numbers.take(); i < count; i = numbers.take()) {
        Unit<T> unit(p, epoch, i / units, i % units * kUnitVecs);
        unit.sum();
        unit.send();
    }
}

template <typename Tiling>
using NormParameter =
    std::conditional_t<(Tiling::kVecsPerThread > 2), ReloadedParameter, RowParameter<Tiling>>;

template <typename T, typename Tiling, RowNorm kNorm>
__device__ __forceinline__ void normalize_rows(const TwoShotParams& p, uint32_t epoch) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / 8);
    const NormParameter<Tiling> weight(p.norm.weight, lane, num_vecs);
    const NormParameter<Tiling> bias(p.norm.bias, lane, num_vecs);
    WorkQueue<Tiling::kThreadsPerRow> numbers(p, kRowOfAllTicket);
    for (int i = numbers.take(); i < p.rows_of_owner * p.peers.size; i = numbers.take()) {
        const RowOfPeer at(p, i, p.peers.size);
        if (!at.exists) continue;
        const int row = at.rows.first + at.index;
        uint4* first = sum_at(p, p.peers.rank, epoch, row) + lane;
        if (lane == 0) wait_for_word(p.peers, at.peer, first);
        sync_row<Tiling>();
        RawRow<Tiling> words;
        const bool is_whole = peek<Tiling>(words, first, lane, num_vecs);
        wait_for_row<Tiling>(p.peers, at.peer, words, is_whole, first, lane, num_vecs);
        clear_staging<Tiling>(first, lane, num_vecs);
        store_words<Tiling>(words.words, lane, row, num_vecs,
                            {p.norm.sum_out, nullptr, nullptr, false});
        RowRegisters<T, Tiling> h;
        clear_row<T, Tiling>(h);
        add_row<T, Tiling>(h, words);
        store_normalized_row<T, Tiling, kNorm>(h, lane, row, weight, bias, p.norm.hidden_size,
                                               p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
}

// On an SM that sends, loads wait behind its stores: with many rows, every other SM only
// normalizes.
__device__ __forceinline__ bool sums_first(const TwoShotParams& p) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return !p.has_roles || sm % 2 == 0;
}

// The last CTA to get here, when all have taken their last ticket.
__device__ __forceinline__ void reset_tickets(const TwoShotParams& p) {
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
    normalize_rows<T, Tiling, kNorm>(p, epoch);
    if (p.has_roles) reset_tickets(p);
    wait_for_prior_kernel();
    if (ends_call) end_sum(p, epoch);
}

// All CTAs are resident at once: the rows that each waits for may depend on what all of these send.
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
    // After the GEMM that sends its own tiles, the parts arrive together, and all SMs sum. The
    // roles need more CTAs than half of the SMs hold, so that some run on the other half.
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
        throw std::invalid_argument(std::string(op) +
                                    " needs sum_out: it normalizes what it has sent");
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
