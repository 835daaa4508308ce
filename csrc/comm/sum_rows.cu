// The second half of gemm_reduce_scatter, and of gemm_all_reduce for many rows: partial sums of all
// ranks, summed up, with bias, residual and norm.
//
//   h = residual + bias + sum over ranks of part[rank];  sum_out = h;  out = norm(h)
//
// The parts lie in slots [tp_size, rows, n] of this rank's memory, written by all ranks, or in memory of
// the caller's; T is f16 or bf16, sums are f32 and in the order of ranks, so every rank that sums a row
// gets the same bits.
// A row is summed in the registers of one warp (up to 1024 features) or of one CTA of 256 threads, as in
// cuda/norm_rows.cuh. A warp of the CTA's own fetches: it waits for the tiles that hold a row, which all
// ranks count when they have stored them, and brings the row's residual and parts by bulk copies into a
// ring, several rows ahead: registers would hold one row of 12288 features an SM. The kernel starts when
// SMs fall free at the end of the GEMM before it. The CTA that starts last ends the call; the next
// call's first kernel says that slots are free.
// Bytes: (tp_size + 3) * rows * n * 2; bound by HBM.
#include <cutlass/arch/barrier.h>

#include <algorithm>
#include <cute/arch/copy_sm90_tma.hpp>

#include "comm/sum_parts.cuh"
#include "common/ring.cuh"

namespace bytetx::comm {
namespace {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

constexpr int kMostSlots = 16;

// CTAs of an SM, as many as its registers hold: rows of a few kilobytes are over before the barriers
// of one of them are. They share what an SM has for rings.
template <typename Tiling>
constexpr int kCtasOfSm = Tiling::kThreadsPerRow <= kWarpSize ? 3
                          : Tiling::kVecsPerThread == 1       ? 5
                          : Tiling::kVecsPerThread == 2       ? 3
                                                              : 1;
template <typename Tiling>
constexpr int kRingBytes = (208 / kCtasOfSm<Tiling> - 4) * 1024;

struct RingSumParams : SumParams {
    int num_slots, slot_bytes;  // of the ring: a row of one array for each row that a CTA sums at once
};

struct Ring {
    uint8_t* slots;
    uint64_t *full, *empty;
};

// Until all ranks have stored the tiles that hold rows [first, last); a whole warp. Pairs with the
// counting of whoever stores tiles.
__device__ __forceinline__ void wait_for_tiles(const SumParams& p, uint32_t epoch, int first,
                                               int last) {
    if (p.shape.parts != nullptr) return;
    const int source = static_cast<int>(threadIdx.x) % kWarpSize;
    const int begin = (p.shape.first_row + first) / p.shape.tile_rows - p.shape.first_tile;
    const int end = (p.shape.first_row + last - 1) / p.shape.tile_rows - p.shape.first_tile;
    for (int tile = begin; source < p.peers.size && tile <= end; ++tile) {
        wait_for(p.peers, source,
                 counter_at(p.peers, p.peers.rank, Counted::tiles, epoch, source, tile),
                 p.shape.count_of_tile);
    }
    __syncwarp();
}

// One warp: residual and parts of the CTA's rows, array by array.
template <typename Tiling>
__device__ __forceinline__ void fetch_rows(const RingSumParams& p, const Ring& ring,
                                           uint32_t epoch) {
    const int64_t row_bytes = p.norm.hidden_size * 2;
    const auto* slots = static_cast<const uint8_t*>(p.shape.parts);
    if (slots == nullptr) slots = quarter_at(p.peers, p.peers.rank, Counted::tiles, epoch);
    const bool is_fetcher = threadIdx.x % kWarpSize == 0;
    AnyRingIndex slot{p.num_slots};
    const auto fetch = [&](const void* rows, int64_t first, int count) {
        if (is_fetcher) {
            EmptyBarrier::wait(&ring.empty[slot.index], slot.phase ^ 1);
            const auto bytes = static_cast<uint32_t>(count * row_bytes);
            FullBarrier::arrive_and_expect_tx(&ring.full[slot.index], bytes);
            cute::SM90_BULK_COPY_G2S::copy(static_cast<const uint8_t*>(rows) + first * row_bytes,
                                           &ring.full[slot.index],
                                           ring.slots + slot.index * p.slot_bytes,
                                           static_cast<int32_t>(bytes));
        }
        slot.advance();
    };
    const int stride = static_cast<int>(gridDim.x) * Tiling::kRowsPerCta;
    fence_proxies();  // residuals are what kernels before the GEMM have stored
    for (int first = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta; first < p.shape.num_rows;
         first += stride) {
        const int count = min(Tiling::kRowsPerCta, p.shape.num_rows - first);
        if (p.norm.residual != nullptr) fetch(p.norm.residual, first, count);
        wait_for_tiles(p, epoch, first, first + count);
        fence_proxies();  // what follows are bulk copies
        for (int source = 0; source < p.peers.size; ++source) {
            fetch(slots, int64_t{source} * p.shape.num_rows + first, count);
        }
    }
}

// h += the next array's row; all threads of the CTA but the fetching warp.
template <typename T, typename Tiling>
__device__ __forceinline__ void add_slot(const RingSumParams& p, const Ring& ring, AnyRingIndex& slot,
                                         int lane, int num_vecs, RowRegisters<T, Tiling>& h) {
    const int place = static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
    const auto* row = reinterpret_cast<const uint4*>(ring.slots + slot.index * p.slot_bytes) +
                      place * num_vecs;
    FullBarrier::wait(&ring.full[slot.index], slot.phase);
    RawRow<Tiling> words;
    words.load(row, 0, lane, num_vecs, [](const uint4* at) { return *at; });
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) EmptyBarrier::arrive(&ring.empty[slot.index]);
    add_row<T, Tiling>(h, words);
    slot.advance();
}

template <typename T, typename Tiling, RowNorm kNorm>
__device__ __forceinline__ void sum_rows(const RingSumParams& p, const Ring& ring) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    // Of wider rows, registers do not hold them beside the row.
    using Parameter = RowParameter<Tiling, Tiling::kVecsPerThread <= 6>;
    const Parameter weight(p.norm.weight, lane, num_vecs);
    const Parameter norm_bias(p.norm.bias, lane, num_vecs);
    const Parameter bias(p.bias, lane, num_vecs);
    const int stride = static_cast<int>(gridDim.x) * Tiling::kRowsPerCta;
    AnyRingIndex slot{p.num_slots};
    for (int first = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta; first < p.shape.num_rows;
         first += stride) {
        const int row = first + static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
        RowRegisters<T, Tiling> h;
        clear_row<T, Tiling>(h);
        if (p.norm.residual != nullptr) add_slot<T, Tiling>(p, ring, slot, lane, num_vecs, h);
        add_parameter<T, Tiling>(h, bias, lane, num_vecs);
#pragma unroll 1
        for (int source = 0; source < p.peers.size; ++source) {
            add_slot<T, Tiling>(p, ring, slot, lane, num_vecs, h);
        }
        if (row >= p.shape.num_rows) continue;
        if (p.norm.sum_out != nullptr) {
            store_row<T, Tiling>(p.norm.sum_out, h, lane, row, num_vecs);
        }
        store_normed_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                           p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
}

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(Tiling::kCtaThreads + kWarpSize, kCtasOfSm<Tiling>)
    sum_rows_kernel(const __grid_constant__ RingSumParams p) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ uint64_t full[kMostSlots], empty[kMostSlots];
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.num_slots; ++i) {
            FullBarrier::init(&full[i], 1);
            EmptyBarrier::init(&empty[i], Tiling::kCtaThreads / kWarpSize);
        }
        cutlass::arch::fence_barrier_init();
    }
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    // Copies are no call of this kind: they have numbers of their own.
    const bool ends_call = p.shape.parts == nullptr && is_last_to_start(p);
    __syncthreads();
    const Ring ring{slots, full, empty};
    if (threadIdx.x >= Tiling::kCtaThreads) {
        fetch_rows<Tiling>(p, ring, epoch);
    } else {
        sum_rows<T, Tiling, kNorm>(p, ring);
    }
    wait_for_prior_kernel();
    if (ends_call) end_sum(p, epoch);
}

template <typename T, typename Tiling, RowNorm kNorm>
void launch_ring_sum(const SumParams& sum, cudaStream_t stream) {
    RingSumParams p{sum};
    constexpr int kThreads = Tiling::kCtaThreads + kWarpSize;
    constexpr int kBytes = kRingBytes<Tiling>;
    constexpr auto kKernel = sum_rows_kernel<T, Tiling, kNorm>;
    allow_smem_once<kKernel>(kBytes);
    p.slot_bytes = static_cast<int>(Tiling::kRowsPerCta * p.norm.hidden_size * sizeof(T));
    p.num_slots = std::min(kMostSlots, kBytes / p.slot_bytes);
    int device;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    static const int64_t resident = resident_ctas(kKernel, kThreads, kBytes, device);
    const int64_t ctas = (p.shape.num_rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
    // One CTA at least: a rank without rows counts its calls, too.
    const auto grid = static_cast<unsigned>(std::clamp<int64_t>(ctas, 1, resident));
    launch_kernel(kKernel, {dim3(grid), dim3(kThreads), kBytes, stream}, p);
}

}  // namespace

void launch_sum(const GemmSumParams& o, const SumShape& shape, cudaStream_t stream) {
    const SumParams p{o.norm, o.bias, make_peers(o.peers), shape};
    if (shape.num_tiles > p.peers.counters_of_source) {
        throw std::invalid_argument("a sum over ranks of this many rows needs more flags than " +
                                    std::to_string(o.peers.num_flags));
    }
    dispatch_sum(o, [&]<typename T, typename Tiling, RowNorm kNorm>() {
        launch_ring_sum<T, Tiling, kNorm>(p, stream);
    });
}

}  // namespace bytetx::comm
