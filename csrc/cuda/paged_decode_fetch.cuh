// The fetching warp of the decode kernel: keys and values of all items in turn, into the ring.
#pragma once

#include "cuda/paged_decode_types.cuh"

namespace bytetx::paged {

// What of an item's record says where its keys are.
struct KeyRange {
    int sequence, position, first_visible, first_key, end_key;

    __device__ int num_steps() const { return (end_key - first_key + kStepKeys - 1) / kStepKeys; }
};

// Arrives for this thread when its copies so far are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
                 : "memory");
}

template <typename C>
struct Fetcher {
    static constexpr int kRowsAtOnce = 32 / C::kPieces;
    static constexpr int kCopies = kStepKeys / kRowsAtOnce;
    const DecodeParams& p;
    DecodeSmem<C>& s;
    int lane, total;
    bool has_waited;  // for the kernel before
    RingIndex<C::kStages> stage;
    int num_fetched = 0;  // steps
    int64_t row_bytes;    // of all key heads
    int lane_bytes;       // 16, or 0 in the padding of a head
    // Of the lane's pieces of a step whose keys are neighbours: their places from its first key on.
    uint32_t from[kCopies], to[kCopies];

    __device__ Fetcher(const DecodeParams& params, DecodeSmem<C>& smem, int of_lane, int num_items)
        : p(params), s(smem), lane(of_lane), total(num_items), has_waited(p.settled == 0) {
        const int piece = lane % C::kPieces;
        row_bytes = int64_t{p.num_kv_heads} * p.head_dim * 2;
        lane_bytes = piece * 8 < p.head_dim ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int row = i * kRowsAtOnce + lane / C::kPieces;
            from[i] = static_cast<uint32_t>(row * row_bytes) + (lane_bytes > 0 ? piece * 16 : 0);
            to[i] = C::offset(row, piece);
        }
    }

    __device__ KeyRange range_of(int record) const {
        const auto field = [&](size_t offset) {
            return __shfl_sync(kFullMask, record, static_cast<int>(offset / sizeof(int)));
        };
        return {field(offsetof(PagedItem, sequence)), field(offsetof(PagedItem, position)),
                field(offsetof(PagedItem, first_visible)), field(offsetof(PagedItem, first_key)),
                field(offsetof(PagedItem, end_key))};
    }

    __device__ const int* table(const KeyRange& keys) const {
        return p.page_table + keys.sequence * p.max_pages;
    }

    // Of 32 steps, a lane a step: the page of its first key that a row sees.
    __device__ int load_pages(const KeyRange& keys, int first_step) const {
        const int step = first_step + lane;
        if (step >= keys.num_steps()) return 0;
        const int key = max(keys.first_key + step * kStepKeys, keys.first_visible);
        return __ldcg(table(keys) + (key >> p.page_shift));
    }

    // Starts the copies of a step's keys, or of its values. `page` holds the step, or pages are
    // smaller than it.
    __device__ void copy_step(const void* cache, const KeyRange& keys, int key, int page,
                              int kv_head, int half) {
        const auto address =
            static_cast<uint32_t>(__cvta_generic_to_shared(s.ring[stage.index][half]));
        const auto* head = static_cast<const uint8_t*>(cache) + kv_head * p.head_dim * 2;
        const int in_page = (1 << p.page_shift) - 1;
        Barrier::wait(&s.empty[stage.index][half], stage.phase ^ 1);
        if (in_page >= kStepKeys - 1 && key >= keys.first_visible &&
            key + kStepKeys <= keys.end_key) {
            const auto* first = head + (int64_t{page} << p.page_shift | (key & in_page)) * row_bytes;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                copy_or_zero(address + to[i], first + from[i], lane_bytes);
            }
        } else {
            copy_rows(head, address, keys, key, page);
        }
        arrive_with_copies(&s.full[stage.index][half]);
    }

    // The same where keys lie anywhere, or no row sees some of them: those become zeros, for their
    // memory may hold anything.
    __device__ void copy_rows(const uint8_t* head, uint32_t address, const KeyRange& keys, int key,
                              int page) const {
        const int piece = lane % C::kPieces, in_page = (1 << p.page_shift) - 1;
#pragma unroll 1
        for (int i = 0; i < kCopies; ++i) {
            const int row = i * kRowsAtOnce + lane / C::kPieces, own = key + row;
            const bool is_seen = own >= keys.first_visible && own < keys.end_key;
            if (is_seen && in_page < kStepKeys - 1) page = __ldcg(table(keys) + (own >> p.page_shift));
            const int64_t slot = int64_t{page} << p.page_shift | (own & in_page);
            const int bytes = is_seen ? lane_bytes : 0;
            copy_or_zero(address + C::offset(row, piece),
                         bytes > 0 ? head + slot * row_bytes + piece * 16 : head, bytes);
        }
    }

    __device__ void fetch(const KeyRange& keys, int key, int page, int kv_head) {
        const bool may_wait = p.settled == 1 || num_fetched == C::kStages;
        if (!has_waited && (may_wait || key + kStepKeys > keys.position)) {
            wait_for_prior_kernel();
            has_waited = true;
        }
        copy_step(p.k_cache, keys, key, page, kv_head, 0);
        copy_step(p.v_cache, keys, key, page, kv_head, 1);
        stage.advance();
        ++num_fetched;
    }

    // Records are read an item ahead and pages 32 steps, so that no copy waits for them.
    __device__ void run(int record) {
        int index = blockIdx.x, first_step = 0;
        KeyRange next = range_of(record);
        int pages_ahead = load_pages(next, 0);  // none of an item that is not there
        const auto load_next = [&] {
            const int after = index + static_cast<int>(gridDim.x);
            record = after < total ? load_record(p, after, lane) : 0;
        };
        load_next();
        while (index < total) {
            const KeyRange keys = next;
            const int pages = pages_ahead, kv_head = index % p.num_kv_heads, first = first_step;
            const int steps = min(keys.num_steps() - first, 32);
            first_step += 32;
            if (first_step >= keys.num_steps()) {
                index += gridDim.x;
                first_step = 0;
                next = range_of(record);
                load_next();
            }
            if (index < total) pages_ahead = load_pages(next, first_step);
            for (int i = 0; i < steps; ++i) {
                fetch(keys, keys.first_key + (first + i) * kStepKeys,
                      __shfl_sync(kFullMask, pages, i), kv_head);
            }
        }
        if (!has_waited) wait_for_prior_kernel();
        wait_for_copies<0>();
    }
};

}  // namespace bytetx::paged
