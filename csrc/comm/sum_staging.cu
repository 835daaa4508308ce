// The second half of gemm_all_reduce for few rows: partial sums of all ranks as they come into the
// staging buffer, summed up, with bias, residual and norm. What it gives, and in which order it
// adds: see sum_rows.cu.
//
// staging buffer [tp_size, rows, n] in this rank's memory, written by all ranks, zero until a word
// has come. A row lives in the registers of one warp (up to 1024 features) or of one CTA of 256
// threads; what does not come from other ranks is loaded before the wait. It starts beside the GEMM
// where both fit an SM. A row takes some 4 us, most of them latency, so of more rows than SMs two
// share one; those beyond the first of each CTA go to whoever is free, for beside a CTA that sends
// rows loads wait. Bytes: (2 * tp_size + 3) * rows * n * 2, for it sets the staging buffer back;
// bound by latency and the links.
#include <algorithm>
#include <type_traits>

#include "comm/staging_row.cuh"
#include "comm/sum_parts.cuh"

namespace bytetx::comm {
namespace {

struct StagingParams : SumParams {
    const void* own_part;
};

// Few rows have an SM each, with registers for all that can be loaded ahead. Where two share one
// (kShares), wide rows read parameters again, and add one part before they look at the next.
template <typename Tiling>
constexpr bool kCanShare = (Tiling::kThreadsPerRow > kWarpSize) && Tiling::kVecsPerThread <= 6;

template <typename Tiling, bool kShares>
using SumParameter = std::conditional_t<kShares && (Tiling::kVecsPerThread > 2), ParameterReadAgain,
                                        RowParameter<Tiling>>;

// h = residual + bias + what each rank has put into the staging buffer, in the order of ranks, as
// it comes. Two are looked at together where registers hold both. Before that one thread waits for
// the first of this rank's own part, lest all of them read all along while weights are.
template <typename T, typename Tiling, bool kShares>
__device__ __forceinline__ void add_inbox(const StagingParams& p,
                                          const SumParameter<Tiling, kShares>& bias, uint32_t epoch,
                                          int64_t row, int lane, int num_vecs,
                                          RowRegisters<T, Tiling>& h) {
    RawRow<Tiling> residual;
    if (p.norm.residual != nullptr) {
        residual.load(p.norm.residual, row, lane, num_vecs, load_coherent);
    }
    clear_row<T, Tiling>(h);
    add_row<T, Tiling>(h, residual);
    add_parameter<T, Tiling>(h, bias, lane, num_vecs);
    uint4* const staging = staging_at(p.peers, p.peers.rank, epoch) + row * num_vecs + lane;
    const int64_t stride = int64_t{p.shape.num_rows} * num_vecs;
    const auto is_here = [&](int source) {
        return source == p.peers.rank && p.own_part != nullptr;
    };
    const auto look = [&](RawRow<Tiling>& part, int source) {
        if (!is_here(source)) {
            return peek<Tiling>(part, staging + source * stride, lane, num_vecs);
        }
        part.load(p.own_part, row, lane, num_vecs, load_coherent);
        return true;
    };
    const auto finish = [&](RawRow<Tiling>& part, bool is_whole, int source) {
        uint4* first = staging + source * stride;
        wait_for_row<Tiling>(p.peers, source, part, is_whole, first, lane, num_vecs);
        add_row<T, Tiling>(h, part);
        if (!is_here(source)) clear_inbox<Tiling>(first, lane, num_vecs);
    };
    if (lane == 0 && p.own_part == nullptr) {
        wait_for_word(p.peers, p.peers.rank, staging + p.peers.rank * stride);
    }
    sync_row<Tiling>();
    constexpr int kTogether = kShares && Tiling::kVecsPerThread > 4 ? 1 : 2;
    for (int source = 0; source < p.peers.size; source += kTogether) {
        RawRow<Tiling> one, other;
        const bool has_other = kTogether > 1 && source + 1 < p.peers.size;
        const bool has_one = look(one, source);
        const bool is_other_whole = has_other && look(other, source + 1);
        finish(one, has_one, source);
        if (has_other) finish(other, is_other_whole, source + 1);
    }
}

// Which row a CTA sums next: its own next one, or, of CTAs that share SMs, the first that nobody
// has asked for.
template <bool kShares>
class RowsInTurn {
  public:
    __device__ __forceinline__ RowsInTurn(const StagingParams& p, int stride)
        : words_(p.peers.epochs), num_rows_(p.shape.num_rows), stride_(stride) {
        if constexpr (kShares) begin_ = __ldcg(words_ + kRowsTaken);
    }

    // All threads of a CTA, between whose calls there are barriers.
    __device__ __forceinline__ int after(int row) const {
        if (!is_dealt()) return row + stride_;
        __shared__ int next;
        if (threadIdx.x == 0) {
            next = stride_ + static_cast<int>(atomicAdd(words_ + kRowTicket, 1) - begin_);
        }
        __syncthreads();
        return next;
    }

    // By one thread, when all CTAs have begun. In a call they ask as many times as there are rows:
    // for those beyond their first ones, and each once in vain.
    __device__ __forceinline__ void end() const {
        if (is_dealt()) words_[kRowsTaken] = begin_ + static_cast<uint32_t>(num_rows_);
    }

  private:
    __device__ __forceinline__ bool is_dealt() const { return kShares && num_rows_ > stride_; }

    uint32_t *words_, begin_ = 0;
    int num_rows_, stride_;
};

template <typename T, typename Tiling, RowNorm kNorm, bool kShares>
__global__ void __launch_bounds__(Tiling::kCtaThreads, kShares ? 2 : 1)
    sum_staging_kernel(const __grid_constant__ StagingParams p) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    release_next_kernel();
    const RowsInTurn<kShares> rows(p, static_cast<int>(gridDim.x) * Tiling::kRowsPerCta);
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    using Parameter = SumParameter<Tiling, kShares>;
    const Parameter weight(p.norm.weight, lane, num_vecs);
    const Parameter norm_bias(p.norm.bias, lane, num_vecs);
    const Parameter bias(p.bias, lane, num_vecs);
    const bool ends_call = is_last_to_start(p);
    for (int row = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta +
                   static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
         row < p.shape.num_rows; row = rows.after(row)) {
        RowRegisters<T, Tiling> h;
        add_inbox<T, Tiling, kShares>(p, bias, epoch, row, lane, num_vecs, h);
        if (p.norm.sum_out != nullptr) {
            store_row<T, Tiling>(p.norm.sum_out, h, lane, row, num_vecs);
        }
        store_normalized_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                               p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
    wait_for_prior_kernel();
    if (ends_call) {
        rows.end();
        end_sum(p, epoch);
    }
}

template <typename T, typename Tiling, RowNorm kNorm, bool kShares>
void launch_rows(const StagingParams& p, cudaStream_t stream) {
    const auto kernel = sum_staging_kernel<T, Tiling, kNorm, kShares>;
    int device;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    static const int64_t resident = resident_ctas(kernel, Tiling::kCtaThreads, 0, device);
    const int64_t ctas = (p.shape.num_rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
    // As many as run beside the CTAs that send the rows, lest the last rows wait for these to end.
    const int64_t most = kShares && p.own_part != nullptr ? resident - kSendingCtas : resident;
    const auto grid = static_cast<unsigned>(std::min(ctas, most));
    launch_kernel(kernel, {dim3(grid), dim3(Tiling::kCtaThreads), 0, stream}, p);
}

}  // namespace

void launch_sum_staging(const GemmSumParams& o, const void* own_part, cudaStream_t stream) {
    const SumShape shape{.num_rows = static_cast<int>(o.linear.m)};
    const StagingParams p{{o.norm, o.bias, make_peers(o.peers), shape}, own_part};
    dispatch_sum(o, [&]<typename T, typename Tiling, RowNorm kNorm>() {
        if constexpr (kCanShare<Tiling>) {
            if (shape.num_rows > num_sms()) {
                return launch_rows<T, Tiling, kNorm, true>(p, stream);
            }
        }
        launch_rows<T, Tiling, kNorm, false>(p, stream);
    });
}

}  // namespace bytetx::comm
