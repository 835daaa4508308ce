// The sum of gemm_all_reduce for small m: all ranks' partial sums as they arrive in the staging
// buffer, plus bias and residual, and the norm of the result. Formula and order: see sum_rows.cu.
//
// The staging buffer [tp_size, rows, n] in this rank's memory is written by all ranks, and zero
// until a word arrives. A row is in the registers of one warp (up to 1024 features) or of one CTA
// of 256 threads; what does not come from other ranks is loaded before the wait. The kernel runs
// beside the GEMM where both fit an SM. A row takes some 4 us, most of them latency, so with more
// rows than SMs, two CTAs share an SM; rows beyond the first of each CTA are taken by the first CTA
// that is free, because loads of a CTA wait on an SM that sends rows. Bytes: (2 * tp_size + 3) *
// rows * n * 2, as it zeroes the staging buffer; bound by latency and the links.
#include <algorithm>
#include <type_traits>

#include "comm/staging_row.cuh"
#include "comm/sum_parts.cuh"

namespace bytetx::comm {
namespace {

struct StagingParams : SumParams {
    const void* own_part;
};

// With few rows, each has an SM, with registers for all that can be loaded ahead. Where two share
// an SM (kShares), wide rows reload the parameters and add one part before they read the next.
template <typename Tiling>
constexpr bool kCanShare = (Tiling::kThreadsPerRow > kWarpSize) && Tiling::kVecsPerThread <= 6;

template <typename Tiling, bool kShares>
using SumParameter = std::conditional_t<kShares && (Tiling::kVecsPerThread > 2), ReloadedParameter,
                                        RowParameter<Tiling>>;

// h = residual + bias + all ranks' parts in the staging buffer, in the order of ranks, as they
// arrive. Two parts are read together where registers hold both. Before that, one thread waits for
// the first word of this rank's own part, so that not all threads poll while the GEMM loads
// weights.
template <typename T, typename Tiling, bool kShares>
__device__ __forceinline__ void add_staging(const StagingParams& p,
                                            const SumParameter<Tiling, kShares>& bias,
                                            uint32_t epoch, int64_t row, int lane, int num_vecs,
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
        if (!is_here(source)) clear_staging<Tiling>(first, lane, num_vecs);
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

// The next row of a CTA: its own next one or, where CTAs share SMs, the first that no CTA has
// taken.
template <bool kShares>
class RowScheduler {
  public:
    __device__ __forceinline__ RowScheduler(const StagingParams& p, int stride)
        : words_(p.peers.epochs), num_rows_(p.shape.num_rows), stride_(stride) {
        if constexpr (kShares) begin_ = __ldcg(words_ + kRowsTaken);
    }

    // All threads of a CTA, between whose calls there are barriers.
    __device__ __forceinline__ int after(int row) const {
        if (!is_dynamic()) return row + stride_;
        __shared__ int next;
        if (threadIdx.x == 0) {
            next = stride_ + static_cast<int>(atomicAdd(words_ + kRowTicket, 1) - begin_);
        }
        __syncthreads();
        return next;
    }

    // One thread, when all CTAs have begun. In a call, the CTAs together take a ticket for each row
    // beyond their first ones, and each CTA takes one more that is beyond the last row.
    __device__ __forceinline__ void end() const {
        if (is_dynamic()) words_[kRowsTaken] = begin_ + static_cast<uint32_t>(num_rows_);
    }

  private:
    __device__ __forceinline__ bool is_dynamic() const { return kShares && num_rows_ > stride_; }

    uint32_t *words_, begin_ = 0;
    int num_rows_, stride_;
};

template <typename T, typename Tiling, RowNorm kNorm, bool kShares>
__global__ void __launch_bounds__(Tiling::kCtaThreads, kShares ? 2 : 1)
    sum_staging_kernel(const __grid_constant__ StagingParams p) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    release_next_kernel();
    const RowScheduler<kShares> rows(p, static_cast<int>(gridDim.x) * Tiling::kRowsPerCta);
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
        add_staging<T, Tiling, kShares>(p, bias, epoch, row, lane, num_vecs, h);
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
    // As many as run beside the CTAs that send the rows, or the last rows would wait for these.
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
