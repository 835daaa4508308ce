// Causal attention of pieces of several tokens over paged keys: the kernel of prefill.
//
// A tile of the plan is a run of tokens of one piece, and the kernel takes it once a key head, with
// all query heads that share it: row r of the tile is token r / group, head r % group, so that keys
// and values are read once for the whole group. Three warpgroups of 64 rows share them; a fourth
// gathers keys by the page table with cp.async, into tiles of 64 keys that lie as wgmma reads them.
// What one warpgroup does with its rows is paged_tile.cuh's.
//
// Keys outside the tile's are written as zeros: a page's rest may hold anything, and a weight of 0
// times NaN is NaN.
#pragma once

#include "common/launch.cuh"
#include "common/row.cuh"
#include "cuda/paged_plan.cuh"
#include "cuda/paged_tile.cuh"

namespace bytetx::paged {

using PrefillBarrier = cutlass::arch::ClusterBarrier;

constexpr int kPrefillWarpgroups = 3;
constexpr int kPrefillRows = kPrefillWarpgroups * kTileRows;
constexpr int kGatherBarrier = 1;  // named; 0 is __syncthreads()

template <int kHeadDim>
struct PrefillTiling {
    static constexpr int kBlockN = 64;
    static constexpr int kStages = kHeadDim <= 64 ? 4 : 3;
    static constexpr int kNumWarpgroups = kPrefillWarpgroups;
    static constexpr int kQStages = 2;
    static constexpr int kConsumerRegisters = 152;
    static constexpr int kGatherRegisters = 56;  // 3 * 152 + 56 registers of 128 threads: 64k
};

struct PrefillParams {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    void* out;
    const int* page_table;
    PagedHeader* header;
    const PagedTile* tiles;
    int64_t max_pages;
    int64_t q_stride;
    int page_shift;
    int num_heads;
    int num_kv_heads;
    int group;
    unsigned group_inverse;  // 2^16 / group, rounded up: divides rows of a tile exactly
    int head_dim;
    int window;
    bool halves_last;  // a last step of half the keys, where a row's bits may depend on its piece
    float scale;       // of scores, to powers of two
    ScoreChange change;

    __device__ int token_of(int row) const { return static_cast<int>(row * group_inverse >> 16); }
    __device__ int head_of(int row) const { return row - token_of(row) * group; }
};

// One tile and key head.
struct TileWork {
    PagedTile tile;
    int kv_head;  // -1: there is no more work
};

template <typename C>
struct PrefillSmem {
    alignas(1024) typename C::Element q[C::kQStages][C::kNumWarpgroups * C::kQElements];
    alignas(1024) typename C::Element k[C::kStages][C::kKvElements];
    alignas(1024) typename C::Element v[C::kStages][C::kKvElements];
    TileWork works[C::kQStages];
    int next_item[2];
    uint64_t q_full[C::kQStages], q_empty[C::kQStages];
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
};

// When all copies of this thread so far have arrived, counts as one arrival.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
                 : "memory");
}

// The gathering warpgroup.
template <typename C>
struct Gatherer {
    using T = typename C::Element;
    static constexpr int kPieces = C::kDim / 8;
    static constexpr int kCopies = kTileRows * kPieces / 128;  // of one thread, a tile of 64 rows
    static constexpr int kUnroll = 4;  // copies whose addresses fit its registers
    const PrefillParams& p;
    int tid, lane;

    // Rows of q: those the tile does not have are zeros.
    __device__ void load_q(const PagedTile& tile, int kv_head, T* q) {
        const auto to = cute::cast_smem_ptr_to_uint(q);
#pragma unroll 1
        for (int i = 0; i < C::kNumWarpgroups * kCopies; ++i) {
            const int row = (i * 128 + tid) / kPieces, column = (i * 128 + tid) % kPieces * 8;
            const bool is_there = row < tile.num_rows && column < p.head_dim;
            const int head = kv_head * p.group + p.head_of(row);
            const int64_t at = is_there ? (tile.first_token + p.token_of(row)) * p.q_stride +
                                              int64_t{head} * p.head_dim + column
                                        : 0;
            copy_or_zero(to + row / kTileRows * C::kQElements * kElementBytes +
                             tile_offset<C>(row % kTileRows, column),
                         static_cast<const T*>(p.q) + at, is_there ? 16 : 0);
        }
    }

    // Slots of the keys block + lane and block + 32 + lane; -1 where no row of the tile sees them.
    __device__ int2 load_slots(const int* pages, int block, int first_visible, int end_key) {
        int slots[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = block + 32 * i + lane;
            slots[i] = -1;
            if (key >= first_visible && key < end_key) {
                const int page = pages[key >> p.page_shift];
                slots[i] = (page << p.page_shift) | (key & ((1 << p.page_shift) - 1));
            }
        }
        return {slots[0], slots[1]};
    }

    __device__ void load_rows(const void* cache, int2 slots, int kv_head, T* rows) {
        const auto to = cute::cast_smem_ptr_to_uint(rows);
#pragma unroll kUnroll
        for (int i = 0; i < kCopies; ++i) {
            const int row = (i * 128 + tid) / kPieces, column = (i * 128 + tid) % kPieces * 8;
            const int low = __shfl_sync(kFullMask, slots.x, row % 32);
            const int high = __shfl_sync(kFullMask, slots.y, row % 32);
            const int slot = row < 32 ? low : high;
            const bool is_there = slot >= 0 && column < p.head_dim;
            const int64_t at =
                is_there ? (int64_t{slot} * p.num_kv_heads + kv_head) * p.head_dim + column : 0;
            copy_or_zero(to + tile_offset<C>(row, column), static_cast<const T*>(cache) + at,
                         is_there ? 16 : 0);
        }
    }

    // CTAs draw tiles, longest first, and the last to draw nothing puts the counters back to 0.
    __device__ void run(PrefillSmem<C>& s, int num_items) {
        RingIndex<C::kQStages> q;
        RingIndex<C::kStages> kv;
        int item = blockIdx.x;
        for (int turn = 0; item < num_items; turn ^= 1) {
            if (tid == 0) {
                s.next_item[turn] =
                    static_cast<int>(gridDim.x + atomicAdd(&p.header->next_tile, 1u));
            }
            gather(s, p.tiles[item / p.num_kv_heads], item % p.num_kv_heads, q, kv);
            cutlass::arch::NamedBarrier::sync(128, kGatherBarrier);
            item = s.next_item[turn];
        }
        PrefillBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);
        if (tid == 0) {
            s.works[q.index].kv_head = -1;
            PrefillBarrier::arrive(&s.q_full[q.index]);
            const unsigned last = gridDim.x - 1;
            if (atomicInc(&p.header->done_ctas, last) == last) p.header->next_tile = 0;
        }
        arrive_after_copies(&s.q_full[q.index]);
        wait_for_copies<0>();
    }

    __device__ void gather(PrefillSmem<C>& s, const PagedTile& tile, int kv_head,
                           RingIndex<C::kQStages>& q, RingIndex<C::kStages>& kv) {
        const int first_visible = tile.first_visible, end_key = tile.end_key;
        const int* pages = p.page_table + tile.sequence * p.max_pages;
        PrefillBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);
        if (tid == 0) {
            s.works[q.index] = {tile, kv_head};
            PrefillBarrier::arrive(&s.q_full[q.index]);
        }
        load_q(tile, kv_head, s.q[q.index]);
        arrive_after_copies(&s.q_full[q.index]);
        q.advance();
        int2 next = load_slots(pages, tile.first_key, first_visible, end_key);
        for (int block = tile.first_key; block < end_key; kv.advance()) {
            const int2 slots = next;
            block += C::kBlockN;
            next = load_slots(pages, block, first_visible, end_key);
            PrefillBarrier::wait(&s.k_empty[kv.index], kv.phase ^ 1);
            load_rows(p.k_cache, slots, kv_head, s.k[kv.index]);
            arrive_after_copies(&s.k_full[kv.index]);
            PrefillBarrier::wait(&s.v_empty[kv.index], kv.phase ^ 1);
            load_rows(p.v_cache, slots, kv_head, s.v[kv.index]);
            arrive_after_copies(&s.v_full[kv.index]);
        }
    }
};

// The keys that a row of the tile sees; a row that the tile does not have sees none, from the end.
__device__ __forceinline__ int2 row_keys(const PrefillParams& p, const TileWork& work, int row) {
    if (row >= work.tile.num_rows) return {work.tile.end_key, work.tile.end_key};
    const int position = work.tile.position + p.token_of(row);
    return {p.window > 0 ? max(0, position + 1 - p.window) : 0, position + 1};
}

// Begins a warpgroup's rows, from first_row of the tile on; returns the keys that any of them sees.
template <typename C>
__device__ __forceinline__ int2 start_rows(const PrefillParams& p, const TileWork& work,
                                           RowTile<C>& rows, int first_row) {
    rows.base = first_row;
    rows.num_rows = work.tile.num_rows - first_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.bounds[half] = row_keys(p, work, rows.row(half));
        rows.row_max[half] = kNoMax;
        rows.sum[half] = 0.0f;
    }
    rows.warp_begin = __shfl_sync(kFullMask, rows.bounds[0].x, 0);
    rows.full_end = __shfl_sync(kFullMask, rows.bounds[0].y, 0);
    rows.full_begin = __shfl_sync(kFullMask, rows.bounds[1].x, 31);
    rows.warp_end = __shfl_sync(kFullMask, rows.bounds[1].y, 31);
    rows.scale = p.change.is_any() ? 1.0f : p.scale;
    rows.is_fresh = true;
    if (rows.num_rows <= 0) return {0, 0};
    const int last = first_row + min(rows.num_rows, kTileRows) - 1;
    return {uniform(row_keys(p, work, first_row).x), uniform(row_keys(p, work, last).y)};
}

// Products with the keys from `first` on become scores in powers of two. Biases count from the
// tile's first token: what all scores of a row have in common has no weight.
template <typename C, typename Scores>
__device__ __forceinline__ void change_scores(const PrefillParams& p, const TileWork& work,
                                              const RowTile<C>& rows, Scores& scores, int first) {
    constexpr int kScores = decltype(cute::size(scores))::value;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores(i) = p.change.cap(scores(i), p.scale);
    if (p.change.alibi_slopes == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // one after the other: registers are scarce
        const int row = min(rows.row(half), work.tile.num_rows - 1);
        const float slope = p.change.slope(work.kv_head * p.group + p.head_of(row));
        const int distance = first + 2 * (rows.lane % 4) - work.tile.position;
        const float nearest = slope * static_cast<float>(distance);
#pragma unroll
        for (int i = 2 * half; i < kScores; i += 4) {
            scores(i) += fmaf(slope, static_cast<float>(2 * i - 4 * half), nearest);
            scores(i + 1) += fmaf(slope, static_cast<float>(2 * i - 4 * half + 1), nearest);
        }
    }
}

// Divides by the sums, stages in the warp's own rows of q, and writes whole 16-byte pieces.
template <typename C>
__device__ __forceinline__ void store_rows(const PrefillParams& p, const TileWork& work,
                                           RowTile<C>& rows, int first_row,
                                           typename C::Element* staging) {
    using T = typename C::Element;
    const int warp_row = rows.tid / 32 * 16;
    if (rows.num_rows <= warp_row) return;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        inverse[half] = reciprocal_approx(quad_sum(rows.sum[half]));
    }
    const uint32_t base = cute::cast_smem_ptr_to_uint(staging);
    const int lane_row = warp_row + rows.lane % 16, lane_column = rows.lane / 16 * 8;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < C::kDim / 16; ++j) {
        uint32_t words[4];  // rows 0-7, rows 8-15, then both again 8 columns on
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = pack_pair<T>(rows.out(8 * j + 2 * i) * inverse[i % 2],
                                    rows.out(8 * j + 2 * i + 1) * inverse[i % 2]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         base + tile_offset<C>(lane_row, 16 * j + lane_column)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    }
    __syncwarp();
    constexpr int kPieces = C::kDim / 8;
#pragma unroll
    for (int i = 0; i < 16 * kPieces / 32; ++i) {
        const int row = (i * 32 + rows.lane) / kPieces, column = (i * 32 + rows.lane) % kPieces * 8;
        const int in_tile = rows.base + warp_row + row;
        if (column >= p.head_dim || in_tile >= work.tile.num_rows) continue;
        uint4 bits;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                     : "r"(base + tile_offset<C>(warp_row + row, column)));
        const int head = work.kv_head * p.group + p.head_of(in_tile);
        const int64_t at =
            int64_t{work.tile.first_token + p.token_of(in_tile)} * p.num_heads + head;
        *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at * p.head_dim + column) = bits;
    }
    __syncwarp();  // before q is given back
}

template <typename C>
__device__ __forceinline__ void consume_tiles(const PrefillParams& p, PrefillSmem<C>& s) {
    constexpr int kN = C::kBlockN;
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
    const int first_row = warpgroup * kTileRows;
    RowTile<C> rows{static_cast<int>(threadIdx.x) % 128, static_cast<int>(threadIdx.x) % 32};
    const auto release = [&](uint64_t* barrier) {
        __syncwarp();
        if (rows.lane == 0) PrefillBarrier::arrive(barrier);
    };
    // cp.async writes as threads do; wgmma reads as the copy engine does.
    const auto wait_full = [&](uint64_t* barrier, int phase) {
        PrefillBarrier::wait(barrier, phase);
        cutlass::arch::fence_view_async_shared();
    };
    RingIndex<C::kQStages> q;
    RingIndex<C::kStages> kv;
    while (true) {
        wait_full(&s.q_full[q.index], q.phase);
        const TileWork& work = s.works[q.index];  // stays until q is given back
        if (work.kv_head < 0) break;
        const int2 own = start_rows(p, work, rows, first_row);
        auto* q_tile = s.q[q.index] + warpgroup * C::kQElements;
        const int end = uniform(work.tile.end_key);
        for (int first = uniform(work.tile.first_key); first < end; first += kN, kv.advance()) {
            const int stage = kv.index, phase = kv.phase;
            wait_full(&s.k_full[stage], phase);
            const auto wait_v = [&] { wait_full(&s.v_full[stage], phase); };
            if (first + kN <= own.x || first >= own.y) {  // another warpgroup's keys
                release(&s.k_empty[stage]);
                wait_v();
                release(&s.v_empty[stage]);
                continue;
            }
            const auto on_scores = [&](auto& scores) {
                release(&s.k_empty[stage]);
                if (p.change.is_any()) change_scores(p, work, rows, scores, first);
            };
            if (p.halves_last && own.y - first <= kN / 2) {
                rows.template attend<kN / 2>(q_tile, s.k[stage], s.v[stage], first, on_scores,
                                             wait_v);
            } else {
                rows.template attend<kN>(q_tile, s.k[stage], s.v[stage], first, on_scores, wait_v);
            }
            release(&s.v_empty[stage]);
        }
        store_rows(p, work, rows, first_row, q_tile);
        release(&s.q_empty[q.index]);
        q.advance();
    }
}

template <typename C>
__global__ void __launch_bounds__(128 * (C::kNumWarpgroups + 1), 1)
    prefill_kernel(const __grid_constant__ PrefillParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<PrefillSmem<C>*>(smem);
    constexpr int kConsumerWarps = 4 * C::kNumWarpgroups;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kQStages; ++i) {
            PrefillBarrier::init(&s.q_full[i], 128 + 1);  // copies, and the work
            PrefillBarrier::init(&s.q_empty[i], kConsumerWarps);
        }
        for (int i = 0; i < C::kStages; ++i) {
            PrefillBarrier::init(&s.k_full[i], 128);
            PrefillBarrier::init(&s.v_full[i], 128);
            PrefillBarrier::init(&s.k_empty[i], kConsumerWarps);
            PrefillBarrier::init(&s.v_empty[i], kConsumerWarps);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_prior_kernel();
    release_next_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / 128) == C::kNumWarpgroups) {
        cutlass::arch::warpgroup_reg_dealloc<C::kGatherRegisters>();
        Gatherer<C> gatherer{p, static_cast<int>(threadIdx.x) % 128,
                             static_cast<int>(threadIdx.x) % 32};
        gatherer.run(s, p.header->num_tiles * p.num_kv_heads);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        consume_tiles<C>(p, s);
    }
}

}  // namespace bytetx::paged
