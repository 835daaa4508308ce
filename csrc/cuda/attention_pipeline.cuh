// pipeline_kernel: persistent CTAs of kNumWarpgroups warpgroups, 64 query rows each, which share
// the keys and values that one producer warp (or warpgroup) fetches. For long sequences: a tile of
// 64 rows that fetches for itself is bound by L2, which gives an SM some 25 bytes a clock, where
// the matrix unit would eat 64.
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
// A Source says where rows and keys come from and where results go: packed rows
// (attention_packed.cuh) or pages of a KV cache (paged_source.cuh). It has
//
//   Params                      the kernel's parameter
//   Item                        a tile and head: begin, end (the keys that any row sees, from a
//                               row that a step can start at), is_any() (false: no more items)
//   Slot                        shared memory of an item: Item item, and what fetch_q adds
//   kProducerWarps              that fetch together
//   kThreadsCopy                keys come by cp.async of all their threads, not by TMA
//   num_items(), read_item(i), counters()                          of the plan
//   shares_gpu()                whether the next kernel runs beside this one
//   num_ctas()                  that work, the first ones; the others leave their SMs to it
//   share(next, slot)           the first thread's number, in all threads of the producer
//   fetch_q(...), start_keys(...), fetch_kv(...)                   the producer's part
//   num_rows(item, warpgroup), bounds(slot, item, warpgroup, row, part)  which keys a row sees
//   power_scale(), change(...), target(slot, item, warpgroup)            scores, results
//   halves_last()               whether a last step may have half the keys
//
// Bytes: keys and values from L2 once a tile and head. Bound by the latency of a step; queries in
// registers save a third of what wgmma reads from shared memory, and 11 % of the time at 4096
// tokens a sequence and 64 features (H200, 2026-11-21). Source: FlashAttention-3 (arXiv
// 2407.08608), section 3.2, for the two products in flight.
#pragma once

#include "cuda/attention_store.cuh"

namespace bytetx::attention {

template <typename C, typename Source>
struct PipelineSmem {
    alignas(1024) typename C::Element q[C::kQStages][C::kNumWarpgroups * C::kQElements];
    alignas(1024) typename C::Element k[C::kStages][C::kKvElements];
    alignas(1024) typename C::Element v[C::kStages][C::kKvElements];
    typename Source::Slot slots[C::kQStages + 1];
    uint64_t q_full[C::kQStages], q_empty[C::kQStages];
    uint64_t kv_full[C::kStages], kv_empty[C::kStages];
};

// The last CTA leaves the counters as it found them: zero, for the next call with this plan.
__device__ __forceinline__ void finish_counting(Counters& counters, int num_ctas) {
    __threadfence();
    if (atomicAdd(&counters.done_ctas, 1) + 1 < num_ctas) return;
    counters.next_item = 0;
    counters.done_ctas = 0;
}

// The warps that fetch. Items come from a counter, for a fixed share of them would leave an SM with
// several of the longest: each CTA begins with its own, and draws one ahead from then on.
template <typename C, typename Source>
__device__ __forceinline__ void produce(const typename Source::Params& p,
                                        PipelineSmem<C, Source>& s, int num_ctas) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    Source source(p);
    const int num_items = source.num_items();
    RingIndex<C::kQStages> q;
    RingIndex<C::kQStages + 1> slot;
    RingIndex<C::kStages> kv;
    int index = blockIdx.x;
    auto item = source.read_item(index < num_items ? index : 0);
    while (index < num_items) {
        int next = 0;
        if (thread == 0) next = num_ctas + atomicAdd(&source.counters().next_item, 1);
        EmptyBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);  // pairs with release_queries
        if (thread == 0) {
            s.slots[slot.index].item = item;  // before the arrival below, which releases it
            source.fetch_q(s.q[q.index], s.slots[slot.index], &s.q_full[q.index], item);
        }
        next = source.share(next, s.slots[slot.index]);
        q.advance();
        slot.advance();
        source.start_keys(item, thread);
#pragma unroll 1  // its few registers do not hold four rounds
        for (int row = item.begin; row < item.end; row += C::kBlockN, kv.advance()) {
            EmptyBarrier::wait(&s.kv_empty[kv.index], kv.phase ^ 1);
            source.fetch_kv(s.k[kv.index], s.v[kv.index], &s.kv_full[kv.index], item, row, thread);
        }
        index = next;
        if (index < num_items) item = source.read_item(index);
    }
    EmptyBarrier::wait(&s.q_empty[q.index], q.phase ^ 1);
    if (thread != 0) return;
    s.slots[slot.index].item = {};  // the end
    EmptyBarrier::arrive(&s.q_full[q.index]);
    finish_counting(source.counters(), num_ctas);
}

// One warpgroup's way through the items.
template <typename C, typename Source>
struct Consumer {
    static constexpr int kN = C::kBlockN, kTail = C::kTail;
    using Item = typename Source::Item;
    Source source;
    PipelineSmem<C, Source>& s;
    int warpgroup;
    SoftmaxRows<C> rows = {};
    RingIndex<C::kQStages> q = {};
    RingIndex<C::kQStages + 1> slot = {};  // outlives the queries
    RingIndex<C::kStages> kv = {};
    int part = 0;  // where in a tree's keys
    uint32_t weights[kN / 4];

    // Each warp arrives for itself: one arrival a warpgroup would need a barrier of its four warps.
    __device__ __forceinline__ void release(uint64_t* barrier) {
        __syncwarp();
        if (rows.lane == 0) EmptyBarrier::arrive(barrier);
    }

    __device__ __forceinline__ void wait_kv() {
        FullBarrier::wait(&s.kv_full[kv.index], kv.phase);
        // Threads wrote; wgmma reads as the copy engine does.
        if constexpr (Source::kThreadsCopy) fence_async_reads();
    }

    __device__ __forceinline__ void pass_on(int steps) {
        for (; steps > 0; --steps) {
            wait_kv();  // else the arrival might count for an earlier phase
            take_turn();
            pass_turn();
            release(&s.kv_empty[kv.index]);
            kv.advance();
        }
    }

    // Two warpgroups issue the products of a step one after the other, so that the softmax of one
    // runs beside the products of the other. Each takes a turn with every step of an item, whether
    // it multiplies or not.
    static constexpr bool kTakesTurns = C::kNumWarpgroups == 2 && !C::kQInRegisters;
    static constexpr uint32_t kTurnBarrier = 2;

    __device__ __forceinline__ void take_turn() const {
        if constexpr (kTakesTurns) {
            sync_threads_of(256, kTurnBarrier + warpgroup);
        }
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (kTakesTurns) {
            arrive_threads_of(256, kTurnBarrier + (warpgroup ^ 1));
        }
    }

    // The next item's queries may come; the slot of this one stays.
    __device__ __forceinline__ void release_queries() { release(&s.q_empty[q.index]); }

    // False where there are no more.
    __device__ __forceinline__ bool take_item() {
        // The call in store_rows keeps what outlives it in vector registers. wgmma's descriptors
        // want uniform ones, and moving each of them costs a quarter of a step's instructions.
        warpgroup = uniform(warpgroup);
        q = {uniform(q.index), uniform(q.phase)};
        slot.index = uniform(slot.index);
        kv = {uniform(kv.index), uniform(kv.phase)};
        FullBarrier::wait(&s.q_full[q.index], q.phase);
        const Item item = read_item();
        if (!item.is_any()) return false;
        if constexpr (!C::kHasTree) find_seen();
        part = -1;
        rows.clear();
        const int begin = item.begin;
        const int2 own = own_keys(item);
        const int num_steps = (item.end - begin + kN - 1) / kN;
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
        const Item done = read_item();
        store_rows<C>(rows, source.num_rows(done, warpgroup),
                      source.target(s.slots[slot.index], done, warpgroup));
        q.advance();
        slot.advance();
        return true;
    }

    // By the lane that arrives for its warp, so that the producer's next write comes after. Read
    // again where it is needed: the loop has no registers to keep it.
    __device__ __forceinline__ Item read_item() const {
        Item item{};
        if (rows.lane == 0) item = s.slots[slot.index].item;
        return item.uniform();
    }

    // Rows past the end see what the last one sees, for a warp whose rows all see a step masks
    // nothing; they are not stored. Warps without any row see no key.
    __device__ __forceinline__ void find_seen() {
        const Item item = read_item();
        const int num_rows = source.num_rows(item, warpgroup);
        const bool is_used = rows.tid / 32 * 16 < num_rows;
        int2 bounds[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(rows.row(half), num_rows - 1);
            bounds[half] = is_used ? source.bounds(s.slots[slot.index], item, warpgroup, row, part)
                                   : make_int2(item.end, item.end);
        }
        if constexpr (C::kHasTree) {
            rows.see_part(bounds, s.slots[slot.index].parts.place[part]);
        } else {
            rows.see(bounds, item.begin);
        }
    }

    // Where the step at a place is the first one of its part of a tree's keys.
    __device__ __forceinline__ void enter(int first) {
        if constexpr (C::kHasTree) {
            const int now = uniform(s.slots[slot.index].parts.part_at(first));
            if (now == part) return;
            part = now;
            find_seen();
        }
    }

    // The keys that a warpgroup's rows see.
    __device__ __forceinline__ int2 own_keys(const Item& item) const {
        const int last = min(source.num_rows(item, warpgroup), kTileRows) - 1;
        if (last < 0) return {0, 0};
        const auto& own = s.slots[slot.index];
        constexpr int kLast = C::kHasTree ? kMaxAncestors : 0;
        const int end = uniform(source.bounds(own, item, warpgroup, last, kLast).y);
        if (C::kHasTree) return {item.begin, end};  // every row sees ancestors
        return {uniform(source.bounds(own, item, warpgroup, 0, 0).x), end};
    }

    __device__ __forceinline__ void attend(const typename C::Element* q_tile, int first, int end) {
        if constexpr (C::kQInRegisters) return attend_apart(q_tile, first, end);
        const int tail = source.halves_last() ? kTail : 0;
        if (end - first <= tail) {
            start<kTail>(q_tile, first, true);
            return finish<kTail>();
        }
        start<kN>(q_tile, first, end - first <= kN);
        for (first += kN; end - first > tail; first += kN) {
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
        rows.load_q(q, q_tile);
        release_queries();
        const int tail = source.halves_last() ? kTail : 0;
        for (; end - first > tail; first += kN) step_apart<kN>(q, first);
        if (first < end) step_apart<kTail>(q, first);
    }

    template <int kWidth>
    __device__ __forceinline__ void step_apart(const uint32_t (&q)[C::kDim / 4], int first) {
        enter(first);
        wait_kv();
        auto scores = rows.template multiply_qk<kWidth>(q, s.k[kv.index]);
        wait_for_products<0>();
        scores.pin();
        float factor[2];
        if (weigh<kWidth>(scores, first, factor)) rows.rescale(factor);
        rows.template pack_weights<kWidth>(weights, scores);
        finish<kWidth>();
    }

    template <int kWidth>
    __device__ __forceinline__ void start(const typename C::Element* q_tile, int first,
                                          bool is_last) {
        enter(first);
        wait_kv();
        take_turn();
        auto scores = rows.template multiply_qk<kWidth>(q_tile, s.k[kv.index]);
        pass_turn();
        wait_for_products<0>();
        scores.pin();
        if (is_last) release_queries();
        float factor[2];  // nothing is in out yet
        weigh<kWidth>(scores, first, factor);
        rows.template pack_weights<kWidth>(weights, scores);
    }

    // Scores of these keys while the weights of the keys before meet their values.
    template <int kWidth>
    __device__ __forceinline__ void step(const typename C::Element* q_tile, int first,
                                         bool is_last) {
        const int before = kv.index;
        kv.advance();
        enter(first);
        wait_kv();
        take_turn();
        auto scores = rows.template multiply_qk<kWidth>(q_tile, s.k[kv.index]);
        rows.template multiply_pv<kN>(weights, s.v[before]);
        pass_turn();
        wait_for_products<1>();
        scores.pin();
        if (is_last) release_queries();
        float factor[2];
        const bool is_raised = weigh<kWidth>(scores, first, factor);
        wait_for_products<0>();
        rows.out.pin();
        scores.pin();  // the weights' registers are free from here on
        release(&s.kv_empty[before]);
        if (is_raised) rows.rescale(factor);
        rows.template pack_weights<kWidth>(weights, scores);
    }

    template <int kWidth>
    __device__ __forceinline__ void finish() {
        rows.template multiply_pv<kWidth>(weights, s.v[kv.index]);
        wait_for_products<0>();
        rows.out.pin();
        release(&s.kv_empty[kv.index]);
        kv.advance();
    }

    // Scores become weights; true where out must be multiplied by factor.
    template <int kWidth, typename Scores>
    __device__ __forceinline__ bool weigh(Scores& scores, int first, float (&factor)[2]) {
        if constexpr (C::kChangesScores) {
            source.template change<kWidth>(read_item(), warpgroup, rows, scores, first);
        }
        // From a score to a power of two; a constant costs no register.
        const float scale = C::kChangesScores ? 1.0f : source.power_scale();
        return rows.template weigh<kWidth>(scores, first, scale, factor, [&] { find_seen(); });
    }
};

template <typename C, typename Source>
__device__ __forceinline__ void consume(const typename Source::Params& p,
                                        PipelineSmem<C, Source>& s) {
    const int thread = static_cast<int>(threadIdx.x);
    Consumer<C, Source> consumer{Source(p), s, uniform(thread / 128)};
    consumer.rows.tid = thread % 128;
    consumer.rows.lane = thread % 32;
    if (consumer.warpgroup == 1) consumer.pass_turn();  // to the first one
    while (consumer.take_item()) {
    }
}

template <typename C, typename Source>
__device__ __forceinline__ void init_barriers(PipelineSmem<C, Source>& s) {
    constexpr int kConsumerWarps = 4 * C::kNumWarpgroups;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kQStages; ++i) {
            FullBarrier::init(&s.q_full[i], 1);
            EmptyBarrier::init(&s.q_empty[i], kConsumerWarps);
        }
        for (int i = 0; i < C::kStages; ++i) {
            FullBarrier::init(&s.kv_full[i],
                              Source::kThreadsCopy ? 32 * Source::kProducerWarps : 1);
            EmptyBarrier::init(&s.kv_empty[i], kConsumerWarps);
        }
        fence_barrier_init();
    }
}

template <typename C, typename Source>
__global__ void __launch_bounds__(128 * (C::kNumWarpgroups + 1), 1)
    pipeline_kernel(const __grid_constant__ typename Source::Params p) {
    static_assert(C::kNumWarpgroups * C::kConsumerRegisters + C::kProducerRegisters <=
                  65536 / (128 * (C::kNumWarpgroups + 1)) / 8 * 8 * (C::kNumWarpgroups + 1));
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *reinterpret_cast<PipelineSmem<C, Source>*>(smem);
    const Source source(p);
    if (!source.shares_gpu()) release_next_kernel();
    init_barriers(s);
    __syncthreads();
    wait_for_prior_kernel();
    // Only now, so that the next kernel finds what this one was to wait for, without a wait.
    if (source.shares_gpu()) release_next_kernel();
    const int num_ctas = source.num_ctas();
    if (static_cast<int>(blockIdx.x) >= num_ctas) return;
    const int thread = static_cast<int>(threadIdx.x);
    if (uniform(thread / 128) == C::kNumWarpgroups) {
        give_registers<C::kProducerRegisters>();
        if (uniform(thread % 128 / 32) < Source::kProducerWarps) produce<C, Source>(p, s, num_ctas);
    } else {
        take_registers<C::kConsumerRegisters>();
        consume<C, Source>(p, s);
    }
}

}  // namespace bytetx::attention
