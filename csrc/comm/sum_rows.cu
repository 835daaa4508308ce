// The second half of gemm_reduce_scatter and gemm_all_reduce: partial sums of all ranks, summed up,
// with bias, residual and norm.
//
//   h = residual + bias + sum over ranks of slot[rank];  sum_out = h;  out = norm(h)
//
// slots or inbox [tp_size, rows, n] in this rank's memory, written by all ranks; T is f16 or bf16,
// sums are f32 and in the order of ranks, so every rank that sums a row gets the same bits.
// A row lives in the registers of one warp (up to 1024 features) or of one CTA of 256 threads, as in
// cuda/norm_rows.cuh. Each waits for the tiles that hold its row, which all ranks count when they
// have stored them, or takes its words from the inbox as they come. It starts when SMs fall free at
// the end of the GEMM before it, or beside that one where both fit an SM; what does not come from
// other ranks is loaded before the wait. The CTA that starts last ends the call; the next call's
// first kernel says that slots are free.
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

// All threads of a row.
template <typename Tiling>
__device__ __forceinline__ void sync_row() {
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
    sync_row<Tiling>();
}

template <typename T, typename Tiling>
__device__ __forceinline__ void add_row(RowRegisters<T, Tiling>& h, const RawRow<Tiling>& row) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) h[i][j] += element<T>(row.words[i], j);
    }
}

// h = residual + bias: what a row's sum begins with, while other ranks' parts are on their way.
template <typename T, typename Tiling>
__device__ __forceinline__ void begin_row(const SumParams& p, int64_t row, int lane, int num_vecs,
                                          RowRegisters<T, Tiling>& h) {
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
    add_row<T, Tiling>(h, residual);
    add_row<T, Tiling>(h, bias);
}

// h += what each rank has put into its slot, in the order of ranks.
template <typename T, typename Tiling>
__device__ __forceinline__ void add_slots(const SumParams& p, const uint8_t* slots, int64_t row,
                                          int lane, int num_vecs, RowRegisters<T, Tiling>& h) {
#pragma unroll 2
    for (int source = 0; source < p.peers.size; ++source) {
        RawRow<Tiling> part;
        part.load(slots, int64_t{source} * p.shape.num_rows + row, lane, num_vecs, load_coherent);
        add_row<T, Tiling>(h, part);
    }
}

// A rank's part of a row in this one's inbox: what has come of it.
template <typename Tiling>
__device__ __forceinline__ bool peek(RawRow<Tiling>& part, const uint4* first, int lane,
                                     int num_vecs) {
    bool is_whole = true;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = i * Tiling::kThreadsPerRow;
        if (lane + v >= num_vecs) continue;
        part.words[i] = load_relaxed(first + v);
        is_whole = is_whole && has_come(part.words[i]);
    }
    return is_whole;
}

// h += what each rank has put into the inbox, in the order of ranks, as it comes. Two are looked at
// together. Before that one thread waits for the first of this rank's own part, lest all of them
// read all along while weights are.
template <typename T, typename Tiling>
__device__ __forceinline__ void add_inbox(const SumParams& p, uint32_t epoch, int64_t row, int lane,
                                          int num_vecs, RowRegisters<T, Tiling>& h) {
    uint4* const inbox = inbox_at(p.peers, p.peers.rank, epoch) + row * num_vecs + lane;
    const int64_t stride = int64_t{p.shape.num_rows} * num_vecs;
    const auto is_here = [&](int source) {
        return source == p.peers.rank && p.shape.own_part != nullptr;
    };
    const auto look = [&](RawRow<Tiling>& part, int source) {
        if (!is_here(source)) {
            return peek<Tiling>(part, inbox + source * stride, lane, num_vecs);
        }
        part.load(p.shape.own_part, row, lane, num_vecs, load_coherent);
        return true;
    };
    const auto finish = [&](RawRow<Tiling>& part, bool is_whole, int source) {
        uint4* first = inbox + source * stride;
        Patience patience;
        while (!is_whole) {
            const auto* at = reinterpret_cast<const uint32_t*>(first);
            if (patience.has_ended(p.peers, source, at, 0, 1)) break;
            is_whole = peek<Tiling>(part, first, lane, num_vecs);
        }
        add_row<T, Tiling>(h, part);
        if (is_here(source)) return;
#pragma unroll
        for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
            const int v = i * Tiling::kThreadsPerRow;
            if (lane + v < num_vecs) first[v] = uint4{};
        }
    };
    if (lane == 0 && p.shape.own_part == nullptr) {
        const auto* at = reinterpret_cast<const uint32_t*>(inbox + p.peers.rank * stride);
        Patience patience;
        while (load_acquire(at) == 0 && !patience.has_ended(p.peers, p.peers.rank, at, 0, 1)) {
        }
    }
    sync_row<Tiling>();
    for (int source = 0; source < p.peers.size; source += 2) {
        RawRow<Tiling> one, other;
        const bool has_other = source + 1 < p.peers.size;
        const bool has_one = look(one, source);
        const bool is_other_whole = has_other && look(other, source + 1);
        finish(one, has_one, source);
        if (has_other) finish(other, is_other_whole, source + 1);
    }
}

template <typename T, typename Tiling>
__device__ __forceinline__ void store_row(void* rows, const RowRegisters<T, Tiling>& h, int64_t row,
                                          int lane, int num_vecs) {
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v < num_vecs) static_cast<uint4*>(rows)[row * num_vecs + v] = pack<T>(h[i]);
    }
}

// Whether this CTA ends the call, in one thread of it: the last whose threads have all read the
// call's number.
// That the rows have been read, the next kernel knows from this one's end.
__device__ __forceinline__ bool is_last_to_start(const SumParams& p) {
    __syncthreads();
    return threadIdx.x == 0 && atomicAdd(p.peers.epochs + kSumTicket, 1) == gridDim.x - 1;
}

__device__ __forceinline__ void end_sum(const SumParams& p, uint32_t epoch) {
    p.peers.epochs[kSumTicket] = 0;
    p.peers.epochs[kSumTiles] = static_cast<uint32_t>(p.shape.num_tiles);
    p.peers.epochs[kSumEpoch] = epoch;
}

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(Tiling::kCtaThreads, 1)
    sum_rows_kernel(const __grid_constant__ SumParams p) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    const RowParameter<Tiling> weight(p.norm.weight, lane, num_vecs);
    const RowParameter<Tiling> norm_bias(p.norm.bias, lane, num_vecs);
    const uint8_t* slots = p.shape.parts != nullptr
                               ? static_cast<const uint8_t*>(p.shape.parts)
                               : quarter_at(p.peers, p.peers.rank, Counted::tiles, epoch);
    const int stride = static_cast<int>(gridDim.x) * Tiling::kRowsPerCta;
    // Copies are no call of this kind: they have numbers of their own.
    const bool ends_call = p.shape.parts == nullptr && is_last_to_start(p);
    int ready_tile = -1;
    for (int row = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta +
                   static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
         row < p.shape.num_rows; row += stride) {
        RowRegisters<T, Tiling> h;
        begin_row<T, Tiling>(p, row, lane, num_vecs, h);
        if (p.shape.is_in_inbox) {
            add_inbox<T, Tiling>(p, epoch, row, lane, num_vecs, h);
        } else {
            const int tile = (p.shape.first_row + row) / p.shape.tile_rows - p.shape.first_tile;
            if (p.shape.parts == nullptr && tile != ready_tile) wait_for_tile<Tiling>(p, epoch, lane, tile);
            ready_tile = tile;
            add_slots<T, Tiling>(p, slots, row, lane, num_vecs, h);
        }
        if (p.norm.sum_out != nullptr) {
            store_row<T, Tiling>(p.norm.sum_out, h, row, lane, num_vecs);
        }
        store_normed_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                           p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
    wait_for_prior_kernel();
    if (ends_call) end_sum(p, epoch);
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
