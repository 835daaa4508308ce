// The sum of gemm_reduce_scatter, and of gemm_all_reduce for large m: all ranks' partial sums plus
// bias and residual, and the norm of the result.
//
//   h = residual + bias + sum over ranks of part[rank];  sum_out = h;  out = norm(h)
//
// The parts are in slots [tp_size, rows, n] of this rank's memory, written by all ranks, or in
// memory of the caller's; T is f16 or bf16. Sums are f32 and in the order of ranks, so every rank
// that sums a row gets the same bits. A row is summed in the registers of one warp (up to 1024
// features) or of one CTA of 256 threads, as in cuda/norm_rows.cuh. One more warp of the CTA
// fetches: it waits for the tiles that contain a row, which all ranks count when they have stored
// them, and loads the row's residual and parts by bulk copies into a ring, several rows ahead
// (registers would hold one row of 12288 features an SM). The kernel starts when SMs become free at
// the end of the GEMM before it. The CTA that starts last ends the call; the next call's first
// kernel announces that the slots are free. For rows that the GEMM's tiles have summed
// (fused_reduce.cuh), only the norm is left. Bytes: (tp_size + 3) * rows * n * 2, for summed
// rows 2 * rows * n * 2; bound by HBM.
#include "comm/sum_ring.cuh"

namespace bytetx::comm {
namespace {

// Rows that a CTA sums at once. is_summed: their sums are in norm.sum_out; only the norm is left.
struct RowGroup {
    int first, count;
    bool is_summed;
};

// Groups of the rows before the summed ones, of the summed ones, and of the rows after them.
struct GroupedSumParams : RingSumParams {
    int groups_before, groups_summed, num_groups;
};

template <typename Tiling>
GroupedSumParams group_rows(const SumParams& p) {
    const auto groups = [](int rows) {
        return (rows + Tiling::kRowsPerCta - 1) / Tiling::kRowsPerCta;
    };
    const int before = groups(p.shape.first_summed);
    const int summed = groups(p.shape.end_summed - p.shape.first_summed);
    const int behind = groups(p.shape.num_rows - p.shape.end_summed);
    return {{p}, before, summed, before + summed + behind};
}

template <typename Tiling>
__device__ __forceinline__ RowGroup group_at(const GroupedSumParams& p, int index) {
    if constexpr (Tiling::kRowsPerCta == 1) {
        return {index, 1, index >= p.shape.first_summed && index < p.shape.end_summed};
    }
    int first = 0, end = p.shape.first_summed;
    bool is_summed = false;
    index -= p.groups_before;
    if (index >= 0) {
        is_summed = index < p.groups_summed;
        first = is_summed ? p.shape.first_summed : p.shape.end_summed;
        end = is_summed ? p.shape.end_summed : p.shape.num_rows;
        if (!is_summed) index -= p.groups_summed;
    } else {
        index += p.groups_before;
    }
    first += index * Tiling::kRowsPerCta;
    return {first, min(Tiling::kRowsPerCta, end - first), is_summed};
}

// Waits until all ranks have stored the tiles that contain these rows (summed rows: this rank). A
// whole warp. Pairs with ScatterEpilogue::publish().
__device__ __forceinline__ void wait_for_tiles(const SumParams& p, uint32_t epoch,
                                               const RowGroup& rows) {
    if (p.shape.parts != nullptr) return;
    const int source = static_cast<int>(threadIdx.x) % kWarpSize;
    const int first = p.shape.first_row + rows.first, last = first + rows.count - 1;
    const int begin = first / p.shape.tile_rows - p.shape.first_tile;
    const int end = last / p.shape.tile_rows - p.shape.first_tile;
    const bool waits = source < p.peers.size && (!rows.is_summed || source == p.peers.rank);
    for (int tile = begin; waits && tile <= end; ++tile) {
        wait_for(p.peers, source,
                 counter_at(p.peers, p.peers.rank, Counted::tiles, epoch, source, tile),
                 p.shape.count_of_tile);
    }
    __syncwarp();
}

// One warp: fetches residual and parts of the CTA's rows, array by array.
template <typename Tiling>
__device__ __forceinline__ void fetch_rows(const GroupedSumParams& p, const Ring& ring,
                                           uint32_t epoch) {
    const void* slots = p.shape.parts;
    if (slots == nullptr) slots = quarter_at(p.peers, p.peers.rank, Counted::tiles, epoch);
    RingFetcher fetcher(p, ring);
    fence_proxies();  // kernels before the GEMM have stored the residuals
    for (int i = static_cast<int>(blockIdx.x); i < p.num_groups; i += gridDim.x) {
        const RowGroup rows = group_at<Tiling>(p, i);
        if (!rows.is_summed && p.norm.residual != nullptr) {
            fetcher.fetch(p.norm.residual, rows.first, rows.count);
        }
        wait_for_tiles(p, epoch, rows);
        fence_proxies();  // bulk copies follow
        if (rows.is_summed) {
            fetcher.fetch(p.norm.sum_out, rows.first, rows.count);
            continue;
        }
        for (int source = 0; source < p.peers.size; ++source) {
            fetcher.fetch(slots, int64_t{source} * p.shape.num_rows + rows.first, rows.count);
        }
    }
}

template <typename T, typename Tiling, RowNorm kNorm>
__device__ __forceinline__ void sum_rows(const GroupedSumParams& p, const Ring& ring) {
    const int lane = static_cast<int>(threadIdx.x) % Tiling::kThreadsPerRow;
    const int num_vecs = static_cast<int>(p.norm.hidden_size / kVecSize<T>);
    // Registers do not hold the parameters of wider rows. Five CTAs share the registers of an SM
    // where a CTA has the narrowest rows; then they do not hold the bias.
    using Parameter = RowParameter<Tiling, Tiling::kVecsPerThread <= 6>;
    constexpr bool kHasRoom = Tiling::kThreadsPerRow <= kWarpSize || Tiling::kVecsPerThread > 1;
    using BiasParameter = RowParameter<Tiling, kHasRoom && Tiling::kVecsPerThread <= 6>;
    const Parameter weight(p.norm.weight, lane, num_vecs);
    const Parameter norm_bias(p.norm.bias, lane, num_vecs);
    const BiasParameter bias(p.bias, lane, num_vecs);
    const int place = static_cast<int>(threadIdx.x) / Tiling::kThreadsPerRow;
    AnyRingIndex slot{p.num_slots};
    for (int i = static_cast<int>(blockIdx.x); i < p.num_groups; i += gridDim.x) {
        const RowGroup rows = group_at<Tiling>(p, i);
        const int row = rows.first + place;
        RowRegisters<T, Tiling> h;
        add_slots<T, Tiling>(p, ring, bias, slot, lane, num_vecs, rows.is_summed, h);
        if (place >= rows.count) continue;
        if (!rows.is_summed && p.norm.sum_out != nullptr) {
            store_row<T, Tiling>(p.norm.sum_out, h, lane, row, num_vecs);
        }
        store_normalized_row<T, Tiling, kNorm>(h, lane, row, weight, norm_bias, p.norm.hidden_size,
                                               p.norm.eps, {p.norm.out, nullptr, nullptr, false});
    }
}

template <typename T, typename Tiling, RowNorm kNorm>
__global__ void __launch_bounds__(kRingThreads<Tiling>, kCtasOfSm<Tiling>)
    sum_rows_kernel(const __grid_constant__ GroupedSumParams p) {
    const Ring ring = make_ring<Tiling>(p);
    release_next_kernel();
    const uint32_t epoch = this_epoch(p.peers, kSumEpoch);
    // sum_copies is not counted as a sum: calls with copies have epochs of their own.
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
        const GroupedSumParams grouped = group_rows<Tiling>(p);
        launch_ring<T, Tiling, sum_rows_kernel<T, Tiling, kNorm>>(grouped, grouped.num_groups,
                                                                  stream);
    });
}

}  // namespace bytetx::comm
