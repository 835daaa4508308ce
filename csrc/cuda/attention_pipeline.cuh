// pipeline_kernel: persistent CTAs of kNumWarpgroups warpgroups, 64 query rows each, which share
// the keys and values that one producer thread fetches. For long sequences: a tile of 64 rows that
// fetches for itself is bound by L2, which gives an SM some 25 bytes a clock, where the matrix unit
// would eat 64.
//
//   producer    K0 V0 K1 V1 K2 V2 K3 V3 ...              through a ring of kStages, past the end of
//                                                        an item into the next one
//   warpgroup   S0  softmax 0 | S1, O += P0 V0  softmax 1 | S2, O += P1 V1  softmax 2 | ...
//
// Above 64 features scores of the next keys and the product with the values of the last ones are
// issued together; the softmax begins when the scores are there, beside that product and beside the
// other warpgroups'. Up to 64 features, where a softmax takes as long as its products, a warpgroup
// goes step by step and the two others fill its waits: that leaves the registers for 128 keys and
// for its queries, which wgmma then need not read from shared memory with every step. Each
// warpgroup takes the steps that hold keys of its own rows and passes the others on.
//
// Bytes: keys and values from L2 once a tile and head. Bound by the latency of a step; queries in
// registers save a third of what wgmma reads from shared memory, and 11 % of the time at 4096
// tokens a sequence and 64 features (H200, 2026-11-21). Source: FlashAttention-3 (arXiv
// 2407.08608), section 3.2, for the two products in flight.
#pragma once

#include "cuda/attention_store.cuh"

namespace bytetx::attention {

// What a consumer must know of an item, besides its queries.
struct Item {
    int base, rows, begin, end;
    int head;
};

template <typename C>
struct PipelineSmem {
    alignas(1024) typename C::Element q[C::kQStages][C::kNumWarpgroups * C::kQElements];
    alignas(1024) typename C::Element k[C::kStages][C::kKvElements];
    alignas(1024) typename C::Element v[C::kStages][C::kKvElements];
    // From an even row on, for a bulk copy starts at 16 bytes.
    alignas(128) int2 row_bounds[C::kQStages + 1][C::kNumWarpgroups * kTileRows + 2];
    alignas(16) Item items[C::kQStages + 1];
    uint64_t q_full[C::kQStages], q_empty[C::kQStages];
    uint64_t kv_full[C::kStages], kv_empty[C::kStages];
};

template <typename C>
__device__ __forceinline__ void fetch_kv(const Params& p, PipelineSmem<C>& s, int stage, int head,
                                         int row) {
    FullBarrier::arrive_and_expect_tx(&s.kv_full[stage], 2 * C::kKvBytes);
    load_tile<C, C::kBlockN>(p.k, &s.kv_full[stage], s.k[stage], head, row);
    load_tile<C, C::kBlockN>(p.v, &s.kv_full[stage], s.v[stage], head, row);
}

// The last CTA leaves the counters as it found them: zero, for the next call with this plan.
__device__ __forceinline__ void finish_counting(Counters& counters) {
    __threadfence();
    if (atomicAdd(&counters.done_ctas, 1) + 1 < static_cast<int>(gridDim.x)) return;
    counters.next_item = 0;
    counters.done_ctas = 0;
}

// The one thread that fetches. Items come from a counter, for a fixed share of them would leave an
// SM with several of the longest: each CTA begins with its own, and draws one ahead from then on.
template <typename C>
__device__ __forceinline__ void produce(const Params& p, PipelineSmem<C>& s) {
    constexpr int kBoundsBytes = (C::kNumWarpgroups * kTileRows + 2) * sizeof(int2);
    const int num_items = *p.used_tiles * p.num_heads;
    RingIndex<C::kQStages> q;
    RingIndex<C::kQStages + 1> slot;
    RingIndex<C::kStages> kv;
    int item = blockIdx.x;
    int4 tile = item < num_items ? p.tiles[item / p.num_heads] : int4{};
    while (item < num_items) {
        const int next = gridDim.x + atomicAdd(&p.counters->next_item, 1);
        const Item now{tile.x, tile.y, tile.z, tile.w, item % p.num_heads};
        EmptyBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);  // pairs with release_queries
        s.items[slot.index] = now;  // before the arrival below, which releases it
        uint64_t* full = &s.q_full[q.index];
        FullBarrier::arrive_and_expect_tx(
            full, C::kNumWarpgroups * C::kQElements * kElementBytes + kBoundsBytes);
#pragma unroll
        for (int w = 0; w < C::kNumWarpgroups; ++w) {
            load_tile<C, kTileRows>(p.q, full, s.q[q.index] + w * C::kQElements, now.head,
                                    now.base + w * kTileRows);
        }
        cute::SM90_BULK_COPY_G2S::copy(p.row_bounds + now.base / 2 * 2, full,
                                       s.row_bounds[slot.index], kBoundsBytes);
        q.advance();
        slot.advance();
        if (next < num_items) tile = p.tiles[next / p.num_heads];
#pragma unroll 1  // its few registers do not hold four rounds
        for (int row = now.begin; row < now.end; row += C::kBlockN, kv.advance()) {
            EmptyBarrier::wait(&s.kv_empty[kv.index], kv.phase ^ 1);
            fetch_kv<C>(p, s, kv.index, now.head / p.group, row);
        }
        item = next;
    }
    EmptyBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);
    s.items[slot.index] = Item{};  // no rows: the end
    EmptyBarrier::arrive(&s.q_full[q.index]);
    finish_counting(*p.counters);
}

// One warpgroup's way through the items.
template <typename C>
struct Consumer {
    static constexpr int kN = C::kBlockN, kTail = C::kTail;
    RowTile<C> tile;
    PipelineSmem<C>& s;
    int warpgroup;
    RingIndex<C::kQStages> q = {};
    RingIndex<C::kQStages + 1> slot = {};  // outlives the queries
    RingIndex<C::kStages> kv = {};
    uint32_t weights[kN / 4];

    // Each warp arrives for itself: one arrival a warpgroup would need a barrier of its four warps.
    __device__ __forceinline__ void release(uint64_t* barrier) {
        __syncwarp();
        if (tile.lane == 0) EmptyBarrier::arrive(barrier);
    }

    __device__ __forceinline__ void wait_kv() { FullBarrier::wait(&s.kv_full[kv.index], kv.phase); }

    __device__ __forceinline__ void pass_on(int steps) {
        for (; steps > 0; --steps) {
            wait_kv();  // else the arrival might count for an earlier phase
            release(&s.kv_empty[kv.index]);
            kv.advance();
        }
    }

    // The next item's queries may come; rows and bounds of this one stay.
    __device__ __forceinline__ void release_queries() { release(&s.q_empty[q.index]); }

    // False where there are no more.
    __device__ __forceinline__ bool take_item() {
        // The call in store_tile keeps what outlives it in vector registers. wgmma's descriptors
        // want uniform ones, and moving each of them costs a quarter of a step's instructions.
        warpgroup = uniform(warpgroup);
        q = {uniform(q.index), uniform(q.phase)};
        slot.index = uniform(slot.index);
        kv = {uniform(kv.index), uniform(kv.phase)};
        FullBarrier::wait(&s.q_full[q.index], q.phase);
        const Item item = read_item();
        const int base = uniform(item.base), rows = uniform(item.rows);
        const int begin = uniform(item.begin), end = uniform(item.end);
        if (rows == 0) return false;
        tile.base = base + warpgroup * kTileRows;
        tile.num_rows = rows - warpgroup * kTileRows;
        const int2* sequences = s.row_bounds[slot.index] + base % 2;
        tile.start(sequences + warpgroup * kTileRows, {begin, end});
        const int2 own = own_keys(sequences, base, rows, warpgroup);
        const int num_steps = (end - begin + kN - 1) / kN;
        const int first_step = own.x < own.y ? (own.x - begin) / kN : num_steps;
        const int last_step = own.x < own.y ? (own.y - begin + kN - 1) / kN : num_steps;
        auto* q_tile = s.q[q.index] + warpgroup * C::kQElements;
        pass_on(first_step);
        if (first_step < last_step) {
            attend(q_tile, begin + first_step * kN, own.y);
        } else {
            release_queries();
        }
        pass_on(num_steps - last_step);
        find_rows();
        tile.head = uniform(item.head);
        store_tile(tile);
        q.advance();
        slot.advance();
        return true;
    }

    // By the lane that arrives for its warp, so that the producer's next write comes after.
    __device__ __forceinline__ Item read_item() const {
        Item item{};
        if (tile.lane == 0) item = s.items[slot.index];
        return item;  // made uniform field by field, from lane 0
    }

    // Read again from shared memory where they are needed: the loop has no registers to keep them.
    __device__ __forceinline__ int find_rows() {
        const Item item = read_item();
        const int base = uniform(item.base);
        tile.base = base + warpgroup * kTileRows;
        tile.num_rows = uniform(item.rows) - warpgroup * kTileRows;
        return base;
    }
    __device__ __forceinline__ void find_seen() {
        const int2* sequences = s.row_bounds[slot.index] + find_rows() % 2;
        const Item item = read_item();
        tile.find_seen(sequences + warpgroup * kTileRows, {uniform(item.begin), uniform(item.end)});
    }

    // The keys that a warpgroup's rows see.
    __device__ __forceinline__ int2 own_keys(const int2* sequences, int base, int rows,
                                             int of) const {
        const int first = of * kTileRows, last = min(rows, first + kTileRows) - 1;
        if (last < first) return {0, 0};
        return {uniform(key_bounds(tile.p, sequences[first], base + first).x),
                uniform(key_bounds(tile.p, sequences[last], base + last).y)};
    }

    __device__ __forceinline__ void attend(const typename C::Element* q_tile, int first, int end) {
        if constexpr (C::kQInRegisters) return attend_apart(q_tile, first, end);
        if (end - first <= kTail) {
            start<kTail>(q_tile, first, true);
            return finish<kTail>();
        }
        start<kN>(q_tile, first, end - first <= kN);
        for (first += kN; end - first > kTail; first += kN) {
            step<kN>(q_tile, first, end - first <= kN);
        }
        if (first >= end) return finish<kN>();
        step<kTail>(q_tile, first, true);
        finish<kTail>();
    }

    // Step by step, with queries in registers.
    __device__ __forceinline__ void attend_apart(const typename C::Element* q_tile, int first,
                                                 int end) {
        uint32_t q[C::kDim / 4];
        tile.load_q(q, q_tile);
        release_queries();
        for (; end - first > kTail; first += kN) step_apart<kN>(q, first);
        if (first < end) step_apart<kTail>(q, first);
    }

    template <int kWidth>
    __device__ __forceinline__ void step_apart(const uint32_t (&q)[C::kDim / 4], int first) {
        wait_kv();
        auto scores = tile.template multiply_qk<kWidth>(q, s.k[kv.index]);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(scores);
        float factor[2];
        const bool is_raised =
            tile.template weigh<kWidth>(scores, first, factor, [&] { find_seen(); });
        if (is_raised) tile.rescale(factor);
        tile.template pack_weights<kWidth>(weights, scores);
        finish<kWidth>();
    }

    template <int kWidth>
    __device__ __forceinline__ void start(const typename C::Element* q_tile, int first,
                                          bool is_last) {
        wait_kv();
        auto scores = tile.template multiply_qk<kWidth>(q_tile, s.k[kv.index]);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(scores);
        if (is_last) release_queries();
        float factor[2];  // nothing is in out yet
        tile.template weigh<kWidth>(scores, first, factor, [&] { find_seen(); });
        tile.template pack_weights<kWidth>(weights, scores);
    }

    // Scores of these keys while the weights of the keys before meet their values.
    template <int kWidth>
    __device__ __forceinline__ void step(const typename C::Element* q_tile, int first,
                                         bool is_last) {
        const int before = kv.index;
        kv.advance();
        wait_kv();
        auto scores = tile.template multiply_qk<kWidth>(q_tile, s.k[kv.index]);
        tile.template multiply_pv<kN>(weights, s.v[before]);
        cute::warpgroup_wait<1>();
        cute::warpgroup_fence_operand(scores);
        if (is_last) release_queries();
        float factor[2];
        const bool is_raised =
            tile.template weigh<kWidth>(scores, first, factor, [&] { find_seen(); });
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(tile.out);
        cute::warpgroup_fence_operand(scores);  // the weights' registers are free from here on
        release(&s.kv_empty[before]);
        if (is_raised) tile.rescale(factor);
        tile.template pack_weights<kWidth>(weights, scores);
    }

    template <int kWidth>
    __device__ __forceinline__ void finish() {
        tile.template multiply_pv<kWidth>(weights, s.v[kv.index]);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(tile.out);
        release(&s.kv_empty[kv.index]);
        kv.advance();
    }
};

template <typename C>
__device__ __forceinline__ void consume(const Params& p, PipelineSmem<C>& s) {
    const int thread = static_cast<int>(threadIdx.x);
    Consumer<C> consumer{RowTile<C>(p), s, uniform(thread / 128)};
    while (consumer.take_item()) {
    }
}

template <typename C>
__device__ __forceinline__ void init_barriers(PipelineSmem<C>& s) {
    constexpr int kConsumerWarps = 4 * C::kNumWarpgroups;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kQStages; ++i) {
            FullBarrier::init(&s.q_full[i], 1);
            EmptyBarrier::init(&s.q_empty[i], kConsumerWarps);
        }
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.kv_full[i], 1);
            EmptyBarrier::init(&s.kv_empty[i], kConsumerWarps);
        }
        cutlass::arch::fence_barrier_init();
    }
}

template <typename C>
__global__ void __launch_bounds__(128 * (C::kNumWarpgroups + 1), 1)
    pipeline_kernel(const __grid_constant__ Params p) {
    static_assert(C::kNumWarpgroups * C::kConsumerRegisters + C::kProducerRegisters <=
                  65536 / (128 * (C::kNumWarpgroups + 1)) / 8 * 8 * (C::kNumWarpgroups + 1));
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<PipelineSmem<C>*>(smem);
    release_next_kernel();
    init_barriers<C>(s);
    __syncthreads();
    wait_for_prior_kernel();
    if (uniform(static_cast<int>(threadIdx.x) / 128) == C::kNumWarpgroups) {
        cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
        if (threadIdx.x % 128 == 0) produce<C>(p, s);
    } else {
        cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
        consume<C>(p, s);
    }
}

}  // namespace bytetx::attention
