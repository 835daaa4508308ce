// Pages of a KV cache as a source of pipeline_kernel: causal attention of pieces of several tokens,
// which are prompts or parts of them.
//
// A tile of the plan is a run of tokens of one piece, and an item is a tile and a key head: a
// warpgroup's rows are its share of the tokens, each with all query heads of the group, row r being
// token r / group, head r % group, so that keys and values are read once for the whole group.
//
// Keys come by TMA, a box a page and step: lane i of the producer warp fetches the step's i-th
// page. wgmma wants eight rows of 128 bytes together, so the map's rows are eight keys and groups
// of eight, and one box writes whole groups, all features of a group next to one another:
//
//   box of a page     group 0: features 0-63 of keys 0-7, features 64-127 of keys 0-7
//                     group 1: features 0-63 of keys 8-15, ...
//
// Heads that do not fill whole boxes of features and pages of fewer than eight tokens come by
// cp.async of a warpgroup (PagedCopySource), into the same places.
//
// A page's rest after the sequence's last key may hold anything. Its keys are masked, and their
// values meet weights of 0; where they are inf or NaN, the rows come out as no number and are
// computed again (attention_store.cuh).
#pragma once

#include "cuda/attention_pipeline.cuh"
#include "cuda/paged_mma.cuh"
#include "cuda/paged_plan.cuh"

namespace bytetx::paged {

using attention::Counters;

// TMA maps first: they must be 64-byte aligned.
struct PrefillParams {
    CUtensorMap q;  // {head_dim, num_heads, total_tokens}
    CUtensorMap k;  // {features of a box, 8 keys, boxes of a key's row, groups of 8 keys}
    CUtensorMap v;
    const void* q_rows;
    const void* k_cache;
    const void* v_cache;
    void* out;
    const int* page_table;
    PagedHeader* header;
    const PagedTile* tiles;
    int64_t max_pages;
    int64_t q_stride;
    int page_shift;
    int box_keys;  // keys of a TMA box: as many as a page or a step has
    int num_heads;
    int num_kv_heads;
    int group;
    unsigned group_inverse;  // 2^16 / group, rounded up: divides rows of a tile exactly
    int head_dim;
    int window;
    bool beside_rows;  // decode rows run at the same time
    bool halves_last;  // a last step of half the keys, where a row's bits may depend on its piece
    float softmax_scale;
    float power_scale;  // the same for powers of two
    ScoreChange change;

    __device__ int token_of(int row) const { return static_cast<int>(row * group_inverse >> 16); }
    __device__ int head_of(int row) const { return row - token_of(row) * group; }
    __device__ int warpgroup_tokens() const { return token_of(kTileRows); }

    // How many of the CTAs should have tiles while the other SMs read the keys of decode rows: so
    // many that both end at about the same time, but half of the SMs at least, for the other half
    // has the memory's rate; and where tiles take longer, not those that rows still need.
    __device__ int num_tile_ctas(int all) const {
        constexpr float kTileNs = 15.0f;        // a key of a tile, on an SM
        constexpr float kBytesPerNs = 3500.0f;  // rate of all SMs together
        constexpr float kSlower = 1.15f;        // tiles wait for memory behind the others' keys
        constexpr float kReaders = 24.0f;       // SMs that use all of the memory's rate
        const float rows = header->item_keys * (4.0f * head_dim / kBytesPerNs);
        const float tiles = header->tile_keys * kTileNs / all;
        const float even = kSlower * all * tiles / rows;
        const float most = all - kReaders * fminf(1.0f, rows / tiles);
        return max(all / 2, static_cast<int>(fminf(even, most)));
    }
};

// Where one warpgroup's rows come from and go to.
template <typename C>
struct PrefillTarget {
    using T = typename C::Element;
    static constexpr int kParts = 1;
    const PrefillParams& p;
    int first_token, position, kv_head, sequence;

    __device__ __forceinline__ int head_dim() const { return p.head_dim; }
    __device__ __forceinline__ T* result(int row) const {
        const int64_t at = int64_t{first_token + p.token_of(row)} * p.num_heads + head(row);
        return static_cast<T*>(p.out) + at * p.head_dim;
    }
    __device__ __forceinline__ int2 bounds(int row, int) const {
        const int own = position + p.token_of(row);
        return {p.window > 0 ? max(0, own + 1 - p.window) : 0, own + 1};
    }
    __device__ __forceinline__ const T* query(int row) const {
        return static_cast<const T*>(p.q_rows) + (first_token + p.token_of(row)) * p.q_stride +
               head(row) * p.head_dim;
    }
    __device__ __forceinline__ const T* key(int key) const { return row_of(p.k_cache, key); }
    __device__ __forceinline__ const T* value(int key) const { return row_of(p.v_cache, key); }
    __device__ __forceinline__ float score(float product, int row, int key) const {
        float score = product * p.softmax_scale;
        if constexpr (C::kChangesScores) {
            if (p.change.softcap > 0.0f) score = p.change.softcap * tanhf(score / p.change.softcap);
            if (p.change.alibi_slopes != nullptr) {
                const int distance = key - position - p.token_of(row);
                score += p.change.alibi_slopes[head(row)] * static_cast<float>(distance);
            }
        }
        return score;
    }

  private:
    __device__ __forceinline__ int head(int row) const {
        return kv_head * p.group + p.head_of(row);
    }
    __device__ __forceinline__ const T* row_of(const void* cache, int key) const {
        const int64_t page = p.page_table[sequence * p.max_pages + (key >> p.page_shift)];
        const int64_t slot = page << p.page_shift | (key & ((1 << p.page_shift) - 1));
        return static_cast<const T*>(cache) + (slot * p.num_kv_heads + kv_head) * p.head_dim;
    }
};

// Base of both ways to fetch keys.
template <typename C>
struct PrefillSource {
    using T = typename C::Element;
    using Params = PrefillParams;

    struct Item {
        int first_token, num_rows, position, begin, end;
        int sequence, kv_head;

        __device__ __forceinline__ bool is_any() const { return num_rows > 0; }
        __device__ __forceinline__ Item uniform() const {
            return {bytetx::uniform(first_token), bytetx::uniform(num_rows),
                    bytetx::uniform(position),    bytetx::uniform(begin),
                    bytetx::uniform(end),         bytetx::uniform(sequence),
                    bytetx::uniform(kv_head)};
        }
    };
    struct Slot {
        Item item;
        int next;
    };
    const Params& p;

    __device__ __forceinline__ explicit PrefillSource(const Params& params) : p(params) {}

    __device__ __forceinline__ int num_items() const {
        return p.header->num_tiles * p.num_kv_heads;
    }
    __device__ __forceinline__ Counters& counters() const { return p.header->counters; }
    __device__ __forceinline__ bool shares_gpu() const { return p.beside_rows; }
    __device__ __forceinline__ int num_ctas() const {
        const int all = static_cast<int>(gridDim.x);
        if (!p.beside_rows || p.header->item_keys == 0) return all;
        return p.num_tile_ctas(all);
    }

    __device__ __forceinline__ Item read_item(int index) const {
        const PagedTile tile = p.tiles[index / p.num_kv_heads];
        return {tile.first_token,      tile.num_rows,
                tile.position,         tile.first_visible / C::kBlockN * C::kBlockN,
                tile.end_key,          tile.sequence,
                index % p.num_kv_heads};
    }

    // Tokens after the piece's are neighbours, whose rows are not stored.
    __device__ __forceinline__ void fetch_q(T* q, Slot&, uint64_t* full, const Item& item) const {
        const int tokens = p.warpgroup_tokens();
        FullBarrier::arrive_and_expect(
            full, C::kNumWarpgroups * tokens * p.group * C::kDim * kElementBytes);
#pragma unroll
        for (int w = 0; w < C::kNumWarpgroups; ++w) {
            attention::load_tile<C, kTileRows>(p.q, full, q + w * C::kQElements,
                                               item.kv_head * p.group,
                                               item.first_token + w * tokens);
        }
    }

    __device__ __forceinline__ int num_rows(const Item& item, int warpgroup) const {
        return min(item.num_rows - warpgroup * rows_of_warpgroup(), rows_of_warpgroup());
    }
    __device__ __forceinline__ int2 bounds(const Slot& slot, const Item& item, int warpgroup,
                                           int row, int) const {
        return target(slot, item, warpgroup).bounds(row, 0);
    }
    __device__ __forceinline__ bool halves_last() const { return p.halves_last; }
    __device__ __forceinline__ float power_scale() const { return p.power_scale; }

    __device__ __forceinline__ PrefillTarget<C> target(const Slot&, const Item& item,
                                                       int warpgroup) const {
        const int before = warpgroup * p.warpgroup_tokens();
        return {p, item.first_token + before, item.position + before, item.kv_head, item.sequence};
    }

    // Products become scores in powers of two. Biases count from the tile's first token: what all
    // scores of a row have in common has no weight.
    template <int kN, typename Rows, typename Scores>
    __device__ __forceinline__ void change(const Item& item, int warpgroup, const Rows& rows,
                                           Scores& scores, int first) const {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) scores(i) = p.change.cap(scores(i), p.power_scale);
        if (p.change.alibi_slopes == nullptr) return;
        const int num_rows = this->num_rows(item, warpgroup);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // one after the other: registers are scarce
            const int row = max(min(rows.row(half), num_rows - 1), 0);
            const float slope = p.change.slope(item.kv_head * p.group + p.head_of(row));
            const int distance = first + 2 * (rows.lane % 4) - item.position;
            const float nearest = slope * static_cast<float>(distance);
#pragma unroll
            for (int i = 2 * half; i < kN / 2; i += 4) {
                scores(i) += fmaf(slope, static_cast<float>(2 * i - 4 * half), nearest);
                scores(i + 1) += fmaf(slope, static_cast<float>(2 * i - 4 * half + 1), nearest);
            }
        }
    }

  private:
    __device__ __forceinline__ int rows_of_warpgroup() const {
        return p.warpgroup_tokens() * p.group;
    }
};

// Keys by TMA.
template <typename C>
struct PagedSource : PrefillSource<C> {
    using Base = PrefillSource<C>;
    using typename Base::Item, typename Base::Params, typename Base::Slot, typename Base::T;
    static constexpr int kProducerWarps = 1;
    static constexpr bool kThreadsCopy = false;
    // Groups of eight keys that no cache has: a box there is filled with zeros.
    static constexpr int kOutside = -(1 << 20);
    int page;  // page of this lane's box of the next step

    __device__ __forceinline__ explicit PagedSource(const Params& params) : Base(params) {}

    __device__ __forceinline__ int share(int value, Slot&) const { return bytetx::uniform(value); }

    __device__ __forceinline__ void start_keys(const Item& item, int lane) {
        page = find_page(item, item.begin + lane * this->p.box_keys);
    }

    __device__ __forceinline__ void fetch_kv(T* k, T* v, uint64_t* full, const Item& item, int row,
                                             int lane) {
        const Params& p = this->p;
        if (lane == 0) FullBarrier::arrive_and_expect(full, 2 * C::kKvBytes);
        __syncwarp();
        const int key = row + lane * p.box_keys;
        if (lane * p.box_keys < C::kBlockN) {
            const int slot = page << p.page_shift | (key & ((1 << p.page_shift) - 1));
            const int group = key < item.end ? slot / 8 : kOutside;
            const int at = lane * p.box_keys * C::kDim;
            const int column = item.kv_head * (C::kDim / C::kBoxColumns);
            load_group(p.k, full, k + at, column, group);
            load_group(p.v, full, v + at, column, group);
        }
        page = find_page(item, key + C::kBlockN);
    }

  private:
    __device__ __forceinline__ int find_page(const Item& item, int key) const {
        if (key >= item.end) return 0;
        return __ldg(this->p.page_table + item.sequence * this->p.max_pages +
                     (key >> this->p.page_shift));
    }
    __device__ __forceinline__ void load_group(const CUtensorMap& map, uint64_t* full, T* to,
                                               int column, int group) const {
        load_box(&map, full, L2Policy::evict_normal, to, 0, 0, column, group);
    }
};

// Keys by cp.async of a warpgroup: any features and pages. Keys outside the tile's are zeros.
template <typename C>
struct PagedCopySource : PrefillSource<C> {
    using Base = PrefillSource<C>;
    using typename Base::Item, typename Base::Params, typename Base::Slot, typename Base::T;
    static constexpr int kProducerWarps = 4;
    static constexpr bool kThreadsCopy = true;
    static constexpr int kShareBarrier = 1;  // named; 0 is __syncthreads()
    static constexpr int kPieces = C::kDim / 8;
    static constexpr int kLaneKeys = C::kBlockN / 32;
    int slots[kLaneKeys];  // cache slots of the next step's keys lane, lane + 32, ...; -1: none

    __device__ __forceinline__ explicit PagedCopySource(const Params& params) : Base(params) {}

    __device__ __forceinline__ int share(int value, Slot& slot) const {
        if (threadIdx.x % 128 == 0) slot.next = value;
        sync_threads_of(128, kShareBarrier);
        return slot.next;
    }

    __device__ __forceinline__ void start_keys(const Item& item, int thread) {
        find_slots(item, item.begin, thread);
    }

    __device__ __forceinline__ void fetch_kv(T* k, T* v, uint64_t* full, const Item& item, int row,
                                             int thread) {
        copy(this->p.k_cache, k, item.kv_head, thread);
        copy(this->p.v_cache, v, item.kv_head, thread);
        // One arrival, when all copies of this thread so far are there.
        asm volatile(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(full))
            : "memory");
        find_slots(item, row + C::kBlockN, thread);
    }

  private:
    __device__ __forceinline__ void find_slots(const Item& item, int row, int thread) {
        const auto& p = this->p;
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
            const int key = row + 32 * i + thread % 32;
            slots[i] = -1;
            if (key < item.end) {
                const int page = p.page_table[item.sequence * p.max_pages + (key >> p.page_shift)];
                slots[i] = page << p.page_shift | (key & ((1 << p.page_shift) - 1));
            }
        }
    }
    __device__ __forceinline__ void copy(const void* cache, T* rows, int kv_head,
                                         int thread) const {
        const auto& p = this->p;
        const auto to = smem_address(rows);
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {  // 32 keys at a time: slots are registers
#pragma unroll 2
            for (int j = 0; j < 32 * kPieces / 128; ++j) {
                const int in_turn = (j * 128 + thread) / kPieces;
                const int column = (j * 128 + thread) % kPieces * 8;
                const int slot = __shfl_sync(kFullMask, slots[i], in_turn);
                const bool is_there = slot >= 0 && column < p.head_dim;
                const int64_t at =
                    is_there ? (int64_t{slot} * p.num_kv_heads + kv_head) * p.head_dim + column : 0;
                copy_or_zero(to + grouped_offset<C>(32 * i + in_turn, column),
                             static_cast<const T*>(cache) + at, is_there ? 16 : 0);
            }
        }
    }
};

}  // namespace bytetx::paged
