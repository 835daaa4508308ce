// How the leader of a cluster finds which tokens a row's limits keep.
#pragma once

#include "cuda/sample_passes.cuh"

namespace bytetx::sampling {

// Adds the other CTAs' bins to the leader's.
__device__ inline void join_bins(uint32_t (&bins)[kBins]) {
    const auto cluster = cg::this_cluster();
    auto* own = reinterpret_cast<uint4*>(bins);
    for (unsigned rank = 1; rank < cluster.num_blocks(); ++rank) {
        const auto* other = reinterpret_cast<const uint4*>(cluster.map_shared_rank(bins, rank));
        for (int i = static_cast<int>(threadIdx.x); i < kBins / 4; i += kThreads) {
            const uint4 a = own[i], b = other[i];
            own[i] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        }
    }
    __syncthreads();
}

// The bins that may hold the first token with which the sum reaches what is needed, and the sum
// before them. bounds(b): least and largest weight of bin b's tokens.
struct Found {
    int lowest;
    int highest;
    double before;  // exact where tokens are counted or each bin has one weight
};

template <typename Bounds>
__device__ Found find_bins(Shared& s, const uint32_t (&bins)[kBins], double needed,
                           const Bounds& bounds) {
    const int first = static_cast<int>(threadIdx.x) * kBinsAThread;
    double2 own{};
#pragma unroll 1
    for (int b = first; b < first + kBinsAThread; ++b) {
        const float2 each = bounds(b);
        own.x += static_cast<double>(bins[b]) * each.x;
        own.y += static_cast<double>(bins[b]) * each.y;
    }
    if (threadIdx.x == 0) s.lowest_bin = s.highest_bin = kBins - 1;
    const Scan scan = cta_scan(s, own);  // its barriers stand before the minima
    double least = scan.before.x, largest = scan.before.y;
    bool is_high = false, is_low = false;
#pragma unroll 1
    for (int b = first; b < first + kBinsAThread; ++b) {
        const float2 each = bounds(b);
        least += static_cast<double>(bins[b]) * each.x;
        largest += static_cast<double>(bins[b]) * each.y;
        if (!is_low && largest >= needed) atomicMin(&s.lowest_bin, b);
        if (!is_high && least >= needed) atomicMin(&s.highest_bin, b);
        is_low |= largest >= needed;
        is_high |= least >= needed;
    }
    __syncthreads();
    const Found found{s.lowest_bin, s.highest_bin, 0.0};
    if (found.lowest / kBinsAThread == static_cast<int>(threadIdx.x)) {
        double before = scan.before.x;
#pragma unroll 1
        for (int b = first; b < found.lowest; ++b) {
            before += static_cast<double>(bins[b]) * bounds(b).x;
        }
        s.before = before;
    }
    __syncthreads();
    return {found.lowest, found.highest, s.before};
}

// The first key of a bin of measure()'s.
__device__ inline uint32_t first_key(int bin) {
    if (bin == 0) return 0;
    const float edge = (static_cast<float>(bin) - 0.5f) / kBinsANat;
    return __float_as_uint(edge) + bin % 2;  // halves are rounded to even bins
}

// The leader's view of its row's limits.
template <typename T>
class Leader {
  public:
    __device__ explicit Leader(Shared& s) : s_(s) {}

    // Keys beyond the limit are out; everything nearer than first_ is in chunk_mass, the rest, up
    // to the limit, in the list.
    __device__ uint32_t limit() const { return limit_; }

    __device__ void keep_nearest(int64_t count) { find<true>(static_cast<double>(count)); }

    __device__ void keep_mass(float share) { find<false>(share * kept_mass()); }

    __device__ void keep_within(float distance) {
        limit_ = min(limit_, __float_as_uint(distance));
        if (limit_ >= first_ || limit_ + 1 == first_) return;
        gather_range(limit_ + 1, limit_);
    }

    // The weights of all that is kept; each thread gives its chunk's.
    __device__ double chunk_mass() {
        const auto chunk = static_cast<int>(threadIdx.x);
        if (chunk >= s_.row.num_chunks) return 0.0;
        return s_.chunk_mass[chunk] + static_cast<double>(s_.list_mass[chunk]) / kFixedOne;
    }

    // Adds up the weights of the list's tokens that are kept, by chunk.
    __device__ void add_list() {
        s_.list_mass[threadIdx.x] = 0;
        __syncthreads();
        if (first_ > limit_) return;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < s_.list_count; i += kThreads) {
            const ListEntry entry = s_.list[i];
            if (entry.key <= limit_) {
                atomicAdd(&s_.list_mass[entry.token / kChunk], fixed(key_weight(entry.key)));
            }
        }
        __syncthreads();
    }

    // All CTAs of the cluster run the command.
    __device__ void issue(const Command& command) {
        const auto cluster = cg::this_cluster();
        if (threadIdx.x < cluster.num_blocks()) {
            cluster.map_shared_rank(&s_, threadIdx.x)->command = command;
        }
        cluster.sync();  // pairs with follow()'s read of the command
        if (command.op == Op::end) return;
        run<T>(command, s_);
        cluster.sync();  // results of all CTAs are there
    }

  private:
    __device__ double kept_mass() {
        add_list();
        return cta_scan(s_, {chunk_mass(), 0.0}).all.x;
    }

    __device__ void gather_range(uint32_t first, uint32_t last) {
        first_ = first;
        __syncthreads();  // pairs with the reads of the count before
        if (threadIdx.x == 0) s_.list_count = 0;
        issue({Op::gather, first, last});
    }

    // Takes what is beyond the first key with which the sum of all up to it reaches the goal out.
    template <bool kCounts>
    __device__ void find(double goal) {
        if (threadIdx.x == 0) s_.goal = goal;
        const auto bounds = [](int b) -> float2 {
            if (kCounts) return {1.0f, 1.0f};
            const float middle = static_cast<float>(b), near = fmaxf(middle - 0.5f, 0.0f);
            const float least = b == kBins - 1 ? 0.0f : weight((middle + 0.5f) / kBinsANat);
            return {least * (1.0f - 1e-5f), weight(near / kBinsANat) * (1.0f + 1e-5f)};
        };
        const Found bins = find_bins(s_, s_.bins, goal, bounds);
        uint32_t first = first_key(bins.lowest);
        uint32_t last = bins.highest == kBins - 1 ? kLastKey : first_key(bins.highest + 1) - 1;
        last = max(min(last, limit_), first);
        double needed = goal - bins.before;
        gather_range(first, last);
        while (s_.list_count > kListSize) {
            if (first < last) narrow_row<kCounts>(needed, first, last);
            if (first == last) {
                limit_ = min(limit_, first);
                return gather_range(first + 1, first);  // all that is kept lies below
            }
            gather_range(first, last);
        }
        if (!kCounts) needed = s_.goal - chunk_sum();
        limit_ = min(limit_, search_list<kCounts>(needed, first, last));
    }

    __device__ double chunk_sum() {
        const auto chunk = static_cast<int>(threadIdx.x);
        const double own = chunk < s_.row.num_chunks ? s_.chunk_mass[chunk] : 0.0;
        return cta_scan(s_, {own, 0.0}).all.x;
    }

    // Keys from first to last hold the limit; below mid they do where the sum of what is below mid
    // reaches the goal, which is to be asked where mid is not beyond last.
    struct Range {
        uint32_t first;
        uint32_t mid;
        uint32_t last;
        double before;
    };

    // The part of a range of keys, counted in `fine`, that the limit must lie in.
    template <bool kCounts>
    __device__ Range narrow(double needed, uint32_t first, uint32_t last) {
        const int shift = fine_shift({Op::end, first, last});
        const auto start = [&](int b) { return first + (static_cast<uint32_t>(b) << shift); };
        const auto bounds = [&](int b) -> float2 {
            if (kCounts) return {1.0f, 1.0f};
            const float slack = shift == 0 ? 0.0f : 1e-6f;
            const uint32_t near = min(start(b), last), far = min(start(b + 1) - 1, last);
            return {key_weight(far) * (1.0f - slack), key_weight(near) * (1.0f + slack)};
        };
        const Found bins = find_bins(s_, s_.fine, needed, bounds);
        const uint32_t end = min(start(bins.highest + 1) - 1, last);
        return {min(start(bins.lowest), last), start(bins.lowest + 1), end, bins.before};
    }

    // Fewer keys, by another pass over the row, or two.
    template <bool kCounts>
    __device__ void narrow_row(double& needed, uint32_t& first, uint32_t& last) {
        if (!kCounts) needed = s_.goal - chunk_sum();
        issue({Op::histogram, first, last});
        join_bins(s_.fine);
        const Range range = narrow<kCounts>(needed, first, last);
        first = range.first;
        last = range.last;
        needed -= range.before;
        if (range.mid > last) return;
        gather_range(range.mid, last);
        if (chunk_sum() >= s_.goal) {
            last = range.mid - 1;
        } else {
            first = range.mid;
        }
    }

    // The sum of the list's tokens with keys from first to end - 1.
    template <bool kCounts>
    __device__ double list_sum(uint32_t first, uint32_t end) {
        Key sum = 0;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < s_.list_count; i += kThreads) {
            const uint32_t key = s_.list[i].key;
            if (key >= first && key < end) sum += kCounts ? 1 : fixed(key_weight(key));
        }
        const double all = cta_scan(s_, {static_cast<double>(sum), 0.0}).all.x;
        return kCounts ? all : all / kFixedOne;
    }

    // The first key with which the sum of the list's reaches what is needed.
    template <bool kCounts>
    __device__ uint32_t search_list(double needed, uint32_t first, uint32_t last) {
        while (first < last) {
            clear(s_.fine);
            const int shift = fine_shift({Op::end, first, last});
#pragma unroll 1
            for (int i = static_cast<int>(threadIdx.x); i < s_.list_count; i += kThreads) {
                const uint32_t key = s_.list[i].key;
                if (key >= first && key <= last) atomicAdd(&s_.fine[(key - first) >> shift], 1u);
            }
            __syncthreads();
            const Range range = narrow<kCounts>(needed, first, last);
            needed -= list_sum<kCounts>(first, range.first);
            first = range.first;
            last = range.last;
            if (range.mid > last) continue;
            const double passed = list_sum<kCounts>(first, range.mid);
            if (passed >= needed) {
                last = range.mid - 1;
            } else {
                first = range.mid;
                needed -= passed;
            }
        }
        return first;
    }

    Shared& s_;
    uint32_t first_ = kLastKey + 1;  // none is listed
    uint32_t limit_ = kLastKey + 1;  // all are kept
};

}  // namespace bytetx::sampling
