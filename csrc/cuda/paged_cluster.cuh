// Decode rows of few sequences: a cluster of CTAs reads one sequence's keys for one key head.
//
// There is no plan, and no merge through global memory. Each of the kClusterCtas CTAs computes its
// chunk from the sequence's lengths; its warps take 16 keys each, round-robin, | w0 | w1 | w2 | w3
// | w0 |, each with its own ring and softmax. The results are merged in shared memory, first over
// the warps, then over the cluster: CTA r gathers the r-th slice of the features from all chunks
// and writes it. The keys of a chunk depend on the sequence alone, and all merges are in key order.
//
// Bytes: q and out once, keys and values of the sequence once. A short sequence is bound by the
// chain of dependent loads: lengths and page table (together), queries and keys (together), shared
// memory of the cluster. One of 1024 keys (8 key heads of 128 features, bf16) takes 4.7 us on an
// H200, 3.8 where its keys may be read early; an empty kernel is 0.8, a pass over the same
// bytes 2.1 (2026-11-21). A very long one is bound by what its 64 CTAs can read: 16384 keys 24 us,
// 0.65 of the copy rate.
#pragma once

#include "cuda/paged_cluster_rows.cuh"
#include "cuda/paged_decode_join.cuh"

namespace bytetx::paged {

constexpr int kStagedPages = 1024;  // pages of a sequence, or else of the CTA's own chunk

struct ClusterParams {
    DecodeParams rows;
    const int* cu_seqlens;
    const int* kv_seqlens;
    int units;      // units of kRows rows per sequence: query heads of a key head
    int num_pages;  // that a sequence can have
};

template <typename C>
struct ClusterSmem {
    alignas(128) uint8_t ring[C::kWarps][kClusterStages][2][C::kHalfBytes];
    alignas(16) uint8_t q[C::kRows * C::kQRowBytes];
    alignas(16) float gathered[kClusterCtas][C::kRows][C::kSlice];
    SoftmaxState gathered_states[kClusterCtas][C::kRows];
    SoftmaxState states[C::kWarps][C::kRows];
    int pages[kStagedPages];

    // A warp's sums, over its own ring, when it has read all its keys.
    __device__ float* sums(int warp) { return reinterpret_cast<float*>(ring[warp]); }
};

__device__ __forceinline__ uint32_t address_in(const void* own, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(shared_address(own)), "r"(rank));
    return address;
}

// This CTA's chunk of a sequence with one row, or nothing where num_rows is 0.
template <typename C>
__device__ __forceinline__ PagedItem own_chunk(const ClusterParams& p, int sequence, int unit,
                                               int rank) {
    PagedItem item{};
    item.sequence = sequence;
    item.first_token = p.cu_seqlens[sequence];
    const int tokens = p.cu_seqlens[sequence + 1] - item.first_token;
    const int keys = p.kv_seqlens[sequence];
    if (tokens != 1 || keys < 1) return item;
    item.row = unit * C::kRows;
    item.num_rows = min(p.rows.group - item.row, C::kRows);
    item.position = keys - 1;
    item.first_visible = p.rows.window > 0 ? max(0, keys - p.rows.window) : 0;
    const int first_key = item.first_visible / kStepKeys * kStepKeys;
    const int share = (keys - first_key + kClusterCtas - 1) / kClusterCtas;
    const int chunk_keys = (share + kRoundKeys - 1) / kRoundKeys * kRoundKeys;
    item.num_chunks = (keys - first_key + chunk_keys - 1) / chunk_keys;
    item.chunk = rank;
    item.first_key = first_key + rank * chunk_keys;
    item.end_key = min(item.first_key + chunk_keys, keys);
    return item;
}

// Pages of a sequence, from one of them on: in shared memory, or where they are too many in memory.
struct Pages {
    const int* table;
    const int* staged;
    int first;

    __device__ int operator[](int index) const {
        const int at = index - first;
        return at < kStagedPages ? staged[at] : table[index];
    }
};

// Copies of 16 keys of the chunk, from `key` on, into a stage.
template <typename C>
__device__ __forceinline__ void fetch_step(StepCopy<C>& copy, const PagedItem& item,
                                           const Pages& pages, int kv_head, int key, uint32_t stage,
                                           int lane) {
    const int shift = copy.p.page_shift, in_page = (1 << shift) - 1;
    if (in_page >= kStepKeys - 1) {
        const int64_t page = pages[max(key, item.first_visible) >> shift];
        return copy.neighbours(stage, page << shift | (key & in_page), kv_head,
                               item.first_visible - key, item.end_key - key);
    }
    const int own = key + lane % kStepKeys;
    const bool is_seen = own >= item.first_visible && own < item.end_key;
    copy.scattered(stage, is_seen ? pages[own >> shift] << shift | (own & in_page) : -1, kv_head);
}

// The chunk's keys against the rows: each warp's sums, to shared memory.
template <typename C>
__device__ __forceinline__ void attend_chunk(const DecodeParams& p, ClusterSmem<C>& s,
                                             const PagedItem& item, const Pages& pages,
                                             int kv_head) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t ring = shared_address(s.ring[warp]);
    constexpr uint32_t kStageBytes = 2 * C::kHalfBytes;
    StagedQueries<C, C::kThreads> queries;
    if (p.early_read == 0) queries.load(p, item, kv_head, threadIdx.x);
    bool has_waited = p.early_read == 0;
    const auto wait_once = [&] {
        if (!has_waited) wait_for_prior_kernel();
        has_waited = true;
    };
    StepCopy<C> copy(p, lane);
    int ahead = item.first_key + warp * kStepKeys;
    const auto fetch = [&](int stage) {
        if (ahead < item.end_key) {
            fetch_step(copy, item, pages, kv_head, ahead, ring + stage * kStageBytes, lane);
        }
        ahead += C::kAllKeys;
        commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < kClusterStages; ++stage) {
        if (p.early_read == 1 || ahead + kStepKeys > item.position) wait_once();
        fetch(stage);
    }
    wait_once();
    if (p.early_read != 0) {
        release_next_kernel();
        queries.load(p, item, kv_head, threadIdx.x);
    }
    queries.store(s.q, threadIdx.x);
    __syncthreads();
    ColumnUnit<C> unit;
    unit.start(p, item, shared_address(s.q), lane);
    const UnitRows rows{p, item, kv_head};
    int stage = 0;
    for (int key = item.first_key + warp * kStepKeys; key < item.end_key; key += C::kAllKeys) {
        wait_for_copies<kClusterStages - 1>();
        __syncwarp();  // every lane's copies are there
        const uint32_t tiles = ring + stage * kStageBytes;
        const auto take = [&](int half) { return tiles + half * C::kHalfBytes; };
        unit.attend(take, [](int) {}, rows, key, lane);
        __syncwarp();  // every lane has read what the next copies overwrite
        fetch(stage);
        stage = stage + 1 == kClusterStages ? 0 : stage + 1;
    }
    unit.template store<C::kSumStride>(s.sums(warp), s.states[warp], item.num_rows, lane);
}

// The warps' sums as one, each slice of features to the CTA that gathers it.
template <typename C>
__device__ __forceinline__ void send_slices(ClusterSmem<C>& s, const PagedItem& item) {
    constexpr int kFours = C::kDim / 4, kSlice = C::kSlice;
    for (int i = threadIdx.x; i < item.num_rows * kFours; i += C::kThreads) {
        const int row = i / kFours, column = i % kFours * 4, owner = column / kSlice;
        SoftmaxState state{kNoMax, 0.0f};
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) state.cover(s.states[w][row]);
        float4 sums{};
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
            const float factor = state.add(s.states[w][row]);
            const float* from = s.sums(w) + row * C::kSumStride + column;
            add_scaled(sums, *reinterpret_cast<const float4*>(from), factor);
        }
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                         address_in(&s.gathered[item.chunk][row][column % kSlice], owner)),
                     "f"(sums.x), "f"(sums.y), "f"(sums.z), "f"(sums.w)
                     : "memory");
        if (column % kSlice == 0) {
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(
                             address_in(&s.gathered_states[item.chunk][row], owner)),
                         "f"(state.max), "f"(state.sum)
                         : "memory");
        }
    }
}

// This CTA's slice of all chunks, divided by the rows' weights, to the output.
template <typename C>
__device__ __forceinline__ void write_slice(const DecodeParams& p, const ClusterSmem<C>& s,
                                            const PagedItem& item, int kv_head) {
    constexpr int kSlice = C::kSlice;
    for (int i = threadIdx.x; i < item.num_rows * kSlice / 4; i += C::kThreads) {
        const int row = i / (kSlice / 4), column = i % (kSlice / 4) * 4;
        const int feature = item.chunk * kSlice + column;
        if (feature >= p.head_dim) continue;
        SoftmaxState state{kNoMax, 0.0f};
        float4 sums{};
        for (int c = 0; c < item.num_chunks; ++c) state.cover(s.gathered_states[c][row]);
#pragma unroll
        for (int c = 0; c < kClusterCtas; ++c) {
            if (c >= item.num_chunks) break;
            const float factor = state.add(s.gathered_states[c][row]);
            add_scaled(sums, *reinterpret_cast<const float4*>(&s.gathered[c][row][column]), factor);
        }
        const int64_t stride = int64_t{p.num_heads} * p.head_dim;
        auto* out = static_cast<typename C::T*>(p.out) + feature;
        store_four(out + row_address(p, item, kv_head, row, stride), sums, 1.0f / state.sum);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas)
    cluster_kernel(const __grid_constant__ ClusterParams params) {
    extern __shared__ __align__(128) uint8_t smem[];
    auto& s = *reinterpret_cast<ClusterSmem<C>*>(smem);
    const DecodeParams& p = params.rows;
    const int rank = blockIdx.x % kClusterCtas, index = blockIdx.x / kClusterCtas;
    const int kv_head = index % p.num_kv_heads, unit = index / p.num_kv_heads;
    const int sequence = unit / params.units;
    const int* table = p.page_table + sequence * p.max_pages;
    if (p.early_read == 0) {
        wait_for_prior_kernel();
        release_next_kernel();
    }
    const bool is_short = params.num_pages <= kStagedPages;
    const auto stage = [&](int first, int count) {
        for (int i = threadIdx.x; i < count; i += C::kThreads) s.pages[i] = table[first + i];
    };
    if (is_short) stage(0, params.num_pages);  // beside the lengths, not after them
    const PagedItem item = own_chunk<C>(params, sequence, unit % params.units, rank);
    if (item.num_rows == 0) {
        wait_for_prior_kernel();
        return;
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const bool has_keys = rank < item.num_chunks;
    const int first_page = is_short ? 0 : item.first_key >> p.page_shift;
    if (has_keys && !is_short) {
        const int last_page = (item.end_key - 1) >> p.page_shift;
        stage(first_page, min(last_page - first_page + 1, kStagedPages));
    }
    __syncthreads();
    if (has_keys) {
        attend_chunk(p, s, item, {table, s.pages, first_page}, kv_head);
    } else {
        wait_for_prior_kernel();
    }
    __syncthreads();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all CTAs of the cluster run
    if (has_keys) send_slices(s, item);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    write_slice(p, s, item, kv_head);
}

}  // namespace bytetx::paged
