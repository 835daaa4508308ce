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
#include "comm/sum_ring.cuh"

namespace bytetx::comm {
namespace {

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
    const void* slots = p.shape.parts;
    if (slots == nullptr) slots = quarter_at(p.peers, p.peers.rank, Counted::tiles, epoch);
    RingFetcher fetcher(p, ring);
    const int stride = static_cast<int>(gridDim.x) * Tiling::kRowsPerCta;
    fence_proxies();  // residuals are what kernels before the GEMM have stored
    for (int first = static_cast<int>(blockIdx.x) * Tiling::kRowsPerCta; first < p.shape.num_rows;
         first += stride) {
        const int count = min(Tiling::kRowsPerCta, p.shape.num_rows - first);
        if (p.norm.residual != nullptr) fetcher.fetch(p.norm.residual, first, count);
        wait_for_tiles(p, epoch, first, first + count);
        fence_proxies();  // what follows are bulk copies
        for (int source = 0; source < p.peers.size; ++source) {
            fetcher.fetch(slots, int64_t{source} * p.shape.num_rows + first, count);
        }
    }
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
        add_slots<T, Tiling>(p, ring, bias, slot, lane, num_vecs, h);
        if (row >= p.shape.num_rows) continue;
        if (p.norm.sum_out != nullptr) {
            store_row<T, Tiling>(p.norm.sum_out, h, lane, row, num_vecs);
        }
        store_normed_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                           p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
}

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(kRingThreads<Tiling>, kCtasOfSm<Tiling>)
    sum_rows_kernel(const __grid_constant__ RingSumParams p) {
    const Ring ring = make_ring<Tiling>(p);
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    // Copies are no call of this kind: they have numbers of their own.
    const bool ends_call = p.shape.parts == nullptr && is_last_to_start(p);
    __syncthreads();
    if (threadIdx.x >= Tiling::kCtaThreads) {
        fetch_rows<Tiling>(p, ring, epoch);
    } else {
        sum_rows<T, Tiling, kNorm>(p, ring);
    }
    wait_for_prior_kernel();
    if (ends_call) end_sum(p, epoch);
}

}  // namespace

void launch_sum(const GemmSumParams& o, const SumShape& shape, cudaStream_t stream) {
    const SumParams p{o.norm, o.bias, make_peers(o.peers), shape};
    check_counters(p, o.peers.num_flags);
    dispatch_sum(o, [&]<typename T, typename Tiling, RowNorm kNorm>() {
        const int64_t ctas = (shape.num_rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
        launch_ring<T, Tiling, sum_rows_kernel<T, Tiling, kNorm>>({p}, ctas, stream);
    });
}

}  // namespace bytetx::comm
