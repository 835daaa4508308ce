// The second half of gemm_reduce_scatter and gemm_all_reduce: partial sums of all ranks, summed up,
// with bias, residual and norm.
//
//   h = sum over ranks of slot[rank] + bias + residual;  sum_out = h;  out = norm(h)
//
// slots [tp_size, rows, n] in this rank's memory, written by all ranks; T is f16 or bf16, sums are
// f32 and in the order of ranks, so every rank that sums a row gets the same bits.
// A row lives in the registers of one warp (up to 1024 features) or of one CTA of 256 threads, as in
// cuda/norm_rows.cuh. Each waits for the tiles that hold its row, which all ranks count when they
// have stored them. It starts when SMs fall free at the end of the GEMM before it, or beside that
// one where both fit an SM. The last CTA sets the counters back and tells every rank that the slots
// have been read.
// Bytes: (tp_size + 3) * rows * n * 2; bound by HBM, or by L2 where the slots fit.
#include <algorithm>
#include <stdexcept>

#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "common/check.cuh"
#include "common/row_norm.cuh"

namespace bytetx::comm {
namespace {

struct SumParams {
    NormParams norm;
    const void* bias;
    Peers peers;
    SumShape shape;
    // Where each rank's rows begin, of all; and where in a slots' quarter rows of other ranks' sums
    // lie, [2, all rows, n]: norms, then sums. Only where shape.sends_round.
    int offsets[kMaxPeers + 1];
    int64_t received;
};

// Past L1, which may hold what lay there in an earlier call.
__device__ __forceinline__ uint4 load_coherent(const uint4* at) {
    uint4 words;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at)
                 : "memory");
    return words;
}

// Of the threads that share a row.
template <typename Tiling>
__device__ __forceinline__ void row_barrier() {
    if constexpr (Tiling::kThreadsPerRow > kWarpSize) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

// Until all ranks have stored the tile that holds `row`; all threads of the row. Pairs with the
// counting of whoever stores tiles.
template <typename Tiling>
__device__ __forceinline__ void wait_for_tile(const SumParams& p, uint32_t epoch, int lane,
                                              int tile) {
    if (lane < p.peers.size) {
        wait_for(p.peers, lane,
                 counter_at(p.peers, p.peers.rank, Counted::tiles, epoch, lane, tile),
                 p.shape.count_of_tile);
    }
    row_barrier<Tiling>();
}

template <typename T, typename Tiling>
__device__ __forceinline__ void add_row(RowRegisters<T, Tiling>& h, const RawRow<Tiling>& row) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] += element<T>(row.words[i], j);
    }
}

// The sum over ranks, then bias and residual.
template <typename T, typename Tiling>
__device__ __forceinline__ void sum_row(const SumParams& p, const uint8_t* slots, int64_t row,
                                        int lane, int num_vecs, RowRegisters<T, Tiling>& h) {
    RawRow<Tiling> residual, bias;
    if (p.norm.residual != nullptr) {
        const int64_t place = row + (p.shape.sends_round ? p.shape.first_row : 0);
        residual.load(p.norm.residual, place, lane, num_vecs, load_coherent);
    }
    if (p.bias != nullptr) bias.load(p.bias, 0, lane, num_vecs, load_coherent);
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] = 0.0f;
    }
    constexpr int kAtOnce = Tiling::kVecsPerThread > 2 ? 2 : 4;
#pragma unroll kAtOnce
    for (int source = 0; source < p.peers.size; ++source) {
        RawRow<Tiling> part;
        part.load(slots, int64_t{source} * p.shape.num_rows + row, lane, num_vecs, load_coherent);
        add_row<T, Tiling>(h, part);
    }
    add_row<T, Tiling>(h, bias);
    add_row<T, Tiling>(h, residual);
}

// What this rank has normed and summed, to all others; `row` of this rank's. All threads of the row.
template <typename T, typename Tiling>
__device__ __forceinline__ void send_round(const SumParams& p, uint32_t epoch, int row, int lane,
                                           int num_vecs) {
    const int64_t all_rows = p.offsets[p.peers.size];
    const int64_t at = int64_t{p.shape.first_row + row} * num_vecs;
    const auto* out = static_cast<const uint4*>(p.norm.out) + at;
    const auto* sum = static_cast<const uint4*>(p.norm.sum_out) + at;
    for (int peer = 0; peer < p.peers.size; ++peer) {
        if (peer == p.peers.rank) continue;
        auto* to = reinterpret_cast<uint4*>(quarter_at(p.peers, peer, Counted::tiles, epoch) +
                                            p.received) + at;
        for (int v = lane; v < num_vecs; v += Tiling::kThreadsPerRow) {
            to[v] = out[v];  // by the thread that has stored it
            to[all_rows * num_vecs + v] = sum[v];
        }
    }
    row_barrier<Tiling>();
    if (lane < p.peers.size && lane != p.peers.rank) {  // pairs with receive_row()
        fence_system();
        add_relaxed(counter_at(p.peers, lane, Counted::rows, epoch, p.peers.rank, row), 1);
    }
}

// A row that another rank has summed.
template <typename T, typename Tiling>
__device__ __forceinline__ void receive_row(const SumParams& p, uint32_t epoch, int row, int lane,
                                            int num_vecs) {
    int owner = 0;
    while (row >= p.offsets[owner + 1]) ++owner;
    if (owner == p.peers.rank) return;
    if (lane == 0) {
        wait_for(p.peers, owner,
                 counter_at(p.peers, p.peers.rank, Counted::rows, epoch, owner,
                            row - p.offsets[owner]),
                 1);
    }
    row_barrier<Tiling>();
    const int64_t all_rows = p.offsets[p.peers.size], at = int64_t{row} * num_vecs;
    const auto* from = reinterpret_cast<const uint4*>(
        quarter_at(p.peers, p.peers.rank, Counted::tiles, epoch) + p.received) + at;
    for (int v = lane; v < num_vecs; v += Tiling::kThreadsPerRow) {
        static_cast<uint4*>(p.norm.out)[at + v] = load_coherent(from + v);
        static_cast<uint4*>(p.norm.sum_out)[at + v] = load_coherent(from + all_rows * num_vecs + v);
    }
}

// By one thread, when all rows have been read: the slots are free for the call after the next.
__device__ __forceinline__ void end_sum(const SumParams& p, uint32_t epoch) {
    for (int source = 0; source < p.peers.size; ++source) {
        for (int i = 0; i < p.shape.num_tiles; ++i) {
            *counter_at(p.peers, p.peers.rank, Counted::tiles, epoch, source, i) = 0;
        }
    }
    for (int source = 0; p.shape.sends_round && source < p.peers.size; ++source) {
        for (int i = 0; i < p.offsets[source + 1] - p.offsets[source]; ++i) {
            *counter_at(p.peers, p.peers.rank, Counted::rows, epoch, source, i) = 0;
        }
    }
    p.peers.epochs[kSumEpoch] = epoch;
    fence_system();
    for (int peer = 0; peer < p.peers.size; ++peer) {
        store_release(p.peers.flags[peer] + kConsumed + p.peers.rank, epoch);
    }
}

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(Tiling::kCtaThreads, 1)
    sum_rows_kernel(const __grid_constant__ SumParams p) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    release_next_kernel();
    const RowParameter<Tiling> weight(p.norm.weight, lane, num_vecs);
    const RowParameter<Tiling> norm_bias(p.norm.bias, lane, num_vecs);
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    const uint8_t* slots = quarter_at(p.peers, p.peers.rank, Counted::tiles, epoch);
    const int stride = static_cast<int>(gridDim.x) * Tiling::kRowsPerCta;
    int ready_tile = -1;
    const int first = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta +
                      static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
    for (int row = first; row < p.shape.num_rows; row += stride) {
        const int tile = (p.shape.first_row + row) / p.shape.tile_rows - p.shape.first_tile;
        if (tile != ready_tile) wait_for_tile<Tiling>(p, epoch, lane, tile);
        ready_tile = tile;
        RowRegisters<T, Tiling> h;
        sum_row<T, Tiling>(p, slots, row, lane, num_vecs, h);
        // Where rows are sent round, residual and results have all rows, of which this rank's are
        // some.
        const int64_t place = row + (p.shape.sends_round ? p.shape.first_row : 0);
        if (p.norm.sum_out != nullptr) {
#pragma unroll
            for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
                const int v = lane + i * Tiling::kThreadsPerRow;
                if (v >= num_vecs) continue;
                static_cast<uint4*>(p.norm.sum_out)[place * num_vecs + v] = pack<T>(h[i]);
            }
        }
        store_normed_row<T, Tiling, kNorm>(h, lane, place, weight, norm_bias, p.norm.hidden_size,
                                           p.norm.eps, {p.norm.out, nullptr, nullptr});
        if (p.shape.sends_round) send_round<T, Tiling>(p, epoch, row, lane, num_vecs);
    }
    for (int row = first; p.shape.sends_round && row < p.offsets[p.peers.size]; row += stride) {
        receive_row<T, Tiling>(p, epoch, row, lane, num_vecs);
    }
    wait_for_prior_kernel();
    __syncthreads();
    if (threadIdx.x == 0 && is_last_cta(p.peers, kSumTicket)) end_sum(p, epoch);
}

constexpr int kFewRowsThreads = 512;  // of a row, where rows alone do not fill the SMs
constexpr int kFewRows = 256;

// dispatch_row_tiling, but more threads a row where there are few: each waits for memory once.
template <typename T, typename F>
bool dispatch_sum_tiling(int64_t rows, int64_t hidden_size, F&& f) {
    const int64_t vecs = (hidden_size / kVecSize<T> + kFewRowsThreads - 1) / kFewRowsThreads;
    if (rows > kFewRows || hidden_size <= kWarpFeatures || vecs > 4) {
        return dispatch_row_tiling<T>(hidden_size, f);
    }
    return dispatch_at_least<1, 2, 3, 4>(vecs, [&]<int kVecs>() {
        f.template operator()<RowTiling<kFewRowsThreads, 1, kVecs>>();
    });
}

template <typename T, RowNorm kNorm>
void launch_typed(const SumParams& p, cudaStream_t stream) {
    const int64_t num_rows = p.norm.total_tokens;
    const int64_t hidden_size = p.norm.hidden_size;
    const bool has_tiling = dispatch_sum_tiling<T>(num_rows, hidden_size, [&]<typename Tiling>() {
        const auto kernel = sum_rows_kernel<T, Tiling, kNorm>;
        int device;
        BYTETX_CUDA_CHECK(cudaGetDevice(&device));
        static const int64_t resident = resident_ctas(kernel, Tiling::kCtaThreads, 0, device);
        const int64_t rows = p.norm.total_tokens;  // summed here, and where they are sent round all
        const int64_t ctas = (rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
        // One CTA at least: a rank without rows counts its calls, too.
        const int64_t grid = std::clamp<int64_t>(ctas, 1, resident);
        launch_kernel(kernel,
                      {dim3(static_cast<unsigned>(grid)), dim3(Tiling::kCtaThreads), 0, stream}, p);
    });
    if (!has_tiling) {
        throw std::invalid_argument("a sum over ranks takes rows of at most 16384 features, got " +
                                    std::to_string(p.norm.hidden_size));
    }
}

}  // namespace

void launch_sum(const GemmSumParams& o, const SumShape& shape, cudaStream_t stream) {
    SumParams p{o.norm, o.bias, make_peers(o.peers), shape};
    int most_rows = 0;
    for (int i = 0; i < o.peers.size; ++i) {
        p.offsets[i + 1] = static_cast<int>(o.row_offsets[i + 1]);
        most_rows = std::max(most_rows, p.offsets[i + 1] - p.offsets[i]);
    }
    p.received = int64_t{o.peers.size} * most_rows * o.norm.hidden_size * 2;
    const int counters = std::max(shape.num_tiles, shape.sends_round ? most_rows : 0);
    if (counters > p.peers.counters_of_source) {
        throw std::invalid_argument("a sum over ranks of this many rows needs more flags than " +
                                    std::to_string(o.peers.num_flags));
    }
    const auto launch_norm = [&]<typename T>() {
        if (o.is_rms) return launch_typed<T, RowNorm::rms>(p, stream);
        launch_typed<T, RowNorm::layer>(p, stream);
    };
    if (o.linear.dtype == DType::f16) return launch_norm.template operator()<__half>();
    launch_norm.template operator()<__nv_bfloat16>();
}

}  // namespace bytetx::comm
