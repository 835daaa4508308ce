// The fetching warps of the decode kernel: keys and values of item after item, into the ring.
#pragma once

#include "cuda/paged_decode_types.cuh"

namespace bytetx::paged {

// Fields of an item's record that say where its keys are.
struct KeyRange {
    int sequence, position, first_visible, first_key, end_key, kv_head;

    __device__ int num_steps() const { return num_steps_of(end_key - first_key); }
};

// Arrives for this thread when its copies so far are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
                 : "memory");
}

// Two warps, one of keys and one of values: each is bound by its own instructions, and half of them
// would leave a CTA that has its SM to itself short of copies.
template <typename C>
struct Fetcher {
    static constexpr int kRowsAtOnce = 32 / C::kPieces;
    static constexpr int kCopies = kStepKeys / kRowsAtOnce;
    const DecodeParams& p;
    DecodeSmem<C>& s;
    const uint8_t *cache, *scales;
    int half, lane, total;
    bool has_waited;  // for the kernel before
    RingIndex<C::kStages> stage;
    int num_fetched = 0;  // stages
    int64_t row_bytes;    // bytes of all key heads
    int lane_bytes;       // 16, or 0 in the padding of a head
    // Byte offsets, from the first key of a step whose keys are neighbours, of the lane's pieces.
    uint32_t from[kCopies], to[kCopies];

    __device__ Fetcher(const DecodeParams& params, DecodeSmem<C>& smem, int of_half, int of_lane,
                       int num_items)
        : p(params),
          s(smem),
          cache(static_cast<const uint8_t*>(of_half == 0 ? p.k_cache : p.v_cache)),
          scales(of_half == 0 ? p.k_scales : p.v_scales),
          half(of_half),
          lane(of_lane),
          total(num_items),
          has_waited(p.early_read == 0) {
        const int piece = lane % C::kPieces;
        row_bytes = int64_t{p.num_kv_heads} * p.head_dim * C::kKeyBytes;
        lane_bytes = piece * C::kPieceKeys < p.head_dim ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int row = i * kRowsAtOnce + lane / C::kPieces;
            from[i] = static_cast<uint32_t>(row * row_bytes) + (lane_bytes > 0 ? piece * 16 : 0);
            to[i] = C::offset(row, piece);
        }
    }

    __device__ KeyRange range_of(int record, int index) const {
        const auto field = [&](size_t offset) {
            return __shfl_sync(kFullMask, record, static_cast<int>(offset / sizeof(int)));
        };
        return {field(offsetof(PagedItem, sequence)),      field(offsetof(PagedItem, position)),
                field(offsetof(PagedItem, first_visible)), field(offsetof(PagedItem, first_key)),
                field(offsetof(PagedItem, end_key)),       index % p.num_kv_heads};
    }

    __device__ const int* table(const KeyRange& keys) const {
        return p.page_table + keys.sequence * p.max_pages;
    }

    // Loads the page of the first key that a row sees, for 32 steps: one lane per step.
    __device__ int load_pages(const KeyRange& keys, int first_step) const {
        const int step = first_step + lane;
        if (step >= keys.num_steps()) return 0;
        const int key = max(keys.first_key + step * kStepKeys, keys.first_visible);
        return __ldcg(table(keys) + (key >> p.page_shift));
    }

    // Byte offset of a key of a page in the cache.
    __device__ int64_t place(const KeyRange& keys, int key, int page) const {
        const int in_page = (1 << p.page_shift) - 1;
        return (int64_t{page} << p.page_shift | (key & in_page)) * row_bytes +
               keys.kv_head * p.head_dim * C::kKeyBytes;
    }

    // The scales of a stage, a step a lane, which has its page: its keys are neighbours there.
    // Those of keys that no row sees may be anything.
    __device__ void copy_scales(const KeyRange& keys, int key, int page, int steps,
                                uint32_t address) const {
        const int in_page = (key + lane * kStepKeys) & ((1 << p.page_shift) - 1);
        const int64_t row = int64_t{page} * p.num_kv_heads + keys.kv_head;
        if (lane < steps) {
            copy_or_zero(address + lane * C::kHalfBytes, scales + (row << p.page_shift) + in_page,
                         16);
        }
    }

    // Copies of a step's rows where they lie anywhere, or no row sees some of them: those become
    // zeros, for their memory may hold anything. `page` holds the step, or pages are smaller.
    __device__ void copy_rows(const KeyRange& keys, int key, int page, uint32_t address) const {
        const int piece = lane % C::kPieces;
#pragma unroll 1
        for (int i = 0; i < kCopies; ++i) {
            const int row = i * kRowsAtOnce + lane / C::kPieces, own = key + row;
            const bool is_seen = own >= keys.first_visible && own < keys.end_key;
            if (is_seen && 1 << p.page_shift < kStepKeys) {
                page = __ldcg(table(keys) + (own >> p.page_shift));
            }
            const int bytes = is_seen ? lane_bytes : 0;
            copy_or_zero(address + C::offset(row, piece),
                         bytes > 0 ? cache + place(keys, own, page) + piece * 16 : cache, bytes);
        }
    }

    __device__ void wait_once() {
        if (!has_waited) wait_for_prior_kernel();
        has_waited = true;
    }

    // Up to 32 steps of an item from the key on; a lane has the page of a step.
    __device__ void fetch(const KeyRange& keys, int key, int steps, int page) {
        const int64_t own_place = place(keys, key + lane * kStepKeys, page);
        const bool has_steps = 1 << p.page_shift >= kStepKeys;  // a page
        int64_t next = __shfl_sync(kFullMask, own_place, 0);
        for (int i = 0; i < steps; i += C::kStageSteps) {
            if (p.early_read < 2 || num_fetched >= C::kStages ||
                key + C::kStageKeys > keys.position) {
                wait_once();
            }
            auto address =
                static_cast<uint32_t>(__cvta_generic_to_shared(s.ring[stage.index][half]));
            Barrier::wait(&s.empty[stage.index][half], stage.phase ^ 1);
            if constexpr (C::kHasCodes) {
                copy_scales(keys, key, __shfl_sync(kFullMask, page, i + lane % C::kStageSteps),
                            min(C::kStageSteps, steps - i), address + C::kTileBytes);
            }
#pragma unroll
            for (int step = 0; step < C::kStageSteps; ++step, key += kStepKeys) {
                if (step > 0 && i + step >= steps) continue;
                const uint8_t* first = cache + next;
                // On its way during the copies.
                next = __shfl_sync(kFullMask, own_place, (i + step + 1) % 32);
                if (has_steps && key >= keys.first_visible && key + kStepKeys <= keys.end_key) {
#pragma unroll
                    for (int j = 0; j < kCopies; ++j) {
                        copy_or_zero(address + to[j], first + from[j], lane_bytes);
                    }
                } else {
                    copy_rows(keys, key, __shfl_sync(kFullMask, page, i + step), address);
                }
                address += C::kHalfBytes;
            }
            arrive_with_copies(&s.full[stage.index][half]);
            stage.advance();
            ++num_fetched;
        }
    }

    // Records are read an item ahead and pages 32 steps, so that no copy waits for them.
    __device__ void run(int record) {
        OwnItems items;
        int first_step = 0;
        KeyRange next = range_of(record, items.current);
        int pages_ahead = load_pages(next, 0);  // none of an item that is not there
        const auto load_next = [&] {
            record = items.next() < total ? load_record(p, items.next(), lane) : 0;
        };
        load_next();
        while (items.current < total) {
            const KeyRange keys = next;
            const int pages = pages_ahead, first = first_step;
            first_step += 32;
            if (first_step >= keys.num_steps()) {
                items.advance();
                first_step = 0;
                next = range_of(record, items.current);
                load_next();
            }
            if (items.current < total) pages_ahead = load_pages(next, first_step);
            fetch(keys, keys.first_key + first * kStepKeys, min(keys.num_steps() - first, 32),
                  pages);
        }
        wait_once();
        // After the wait: what the next kernel may read early has been written. First thing or
        // here: alike.
        release_next_kernel();
        // In one CTA, so that the next kernel's wait for this one is a wait for the tiles, too.
        if (p.beside_tiles && blockIdx.x == gridDim.x - 1) wait_for_prior_kernel();
        wait_for_copies<0>();
    }
};

}  // namespace bytetx::paged
