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
    if constexpr (Tiling::kThreadsPerRow > kWarpSize) {
        __syncthreads();
    } else {
        __syncwarp();
    }
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
        residual.load(p.norm.residual, row, lane, num_vecs, load_coherent);
    }
    if (p.bias != nullptr) bias.load(p.bias, 0, lane, num_vecs, load_coherent);
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] = 0.0f;
    }
#pragma unroll 2
    for (int source = 0; source < p.peers.size; ++source) {
        RawRow<Tiling> part;
        part.load(slots, int64_t{source} * p.shape.num_rows + row, lane, num_vecs, load_coherent);
        add_row<T, Tiling>(h, part);
    }
    add_row<T, Tiling>(h, bias);
    add_row<T, Tiling>(h, residual);
}

// By one thread, when all rows have been read: the slots are free for the call after the next.
__device__ __forceinline__ void end_sum(const SumParams& p, uint32_t epoch) {
    for (int source = 0; source < p.peers.size; ++source) {
        for (int i = 0; i < p.shape.num_tiles; ++i) {
            *counter_at(p.peers, p.peers.rank, Counted::tiles, epoch, source, i) = 0;
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
    for (int row = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta +
                   static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
         row < p.shape.num_rows; row += stride) {
        const int tile = (p.shape.first_row + row) / p.shape.tile_rows - p.shape.first_tile;
        if (tile != ready_tile) wait_for_tile<Tiling>(p, epoch, lane, tile);
        ready_tile = tile;
        RowRegisters<T, Tiling> h;
        sum_row<T, Tiling>(p, slots, row, lane, num_vecs, h);
        if (p.norm.sum_out != nullptr) {
#pragma unroll
            for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
                const int v = lane + i * Tiling::kThreadsPerRow;
                if (v >= num_vecs) continue;
                static_cast<uint4*>(p.norm.sum_out)[int64_t{row} * num_vecs + v] = pack<T>(h[i]);
            }
        }
        store_normed_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                           p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
    wait_for_prior_kernel();
    __syncthreads();
    if (threadIdx.x == 0 && is_last_cta(p.peers, kSumTicket)) end_sum(p, epoch);
}

template <typename T, RowNorm kNorm>
void launch_typed(const SumParams& p, cudaStream_t stream) {
    const bool has_tiling = dispatch_row_tiling<T>(p.norm.hidden_size, [&]<typename Tiling>() {
        const auto kernel = sum_rows_kernel<T, Tiling, kNorm>;
        int device;
        BYTETX_CUDA_CHECK(cudaGetDevice(&device));
        static const int64_t resident = resident_ctas(kernel, Tiling::kCtaThreads, 0, device);
        const int64_t ctas = (p.shape.num_rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
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
    const SumParams p{o.norm, o.bias, make_peers(o.peers), shape};
    if (shape.num_tiles > p.peers.counters_of_source) {
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
