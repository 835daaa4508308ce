// The smallest piece of an all-reduce in two exchanges (two_shot.cu): where parts and sums lie in an
// inbox, and how a warp sums some vectors of a row and sends them to all.
#pragma once

#include "comm/inbox_row.cuh"

namespace bytetx::comm {

constexpr int kUnitVecsOfLane = 2;
constexpr int kUnitVecs = kUnitVecsOfLane * kWarpSize;  // of a row, that a warp sums at once
constexpr int kTogether = 4;                            // ranks' parts that are looked at at once

struct TwoShotParams : SumParams {
    const void* own_part;  // [m, n], or null where it comes through the inbox as well
    int rows_of_owner;     // of each but the last ones
    bool has_roles;        // half of the SMs sum and send before they norm
};

struct Rows {
    int first, count;
};

__device__ __forceinline__ Rows rows_of(const TwoShotParams& p, int owner) {
    const int first = min(owner * p.rows_of_owner, p.shape.num_rows);
    return {first, min(p.rows_of_owner, p.shape.num_rows - first)};
}

__device__ __forceinline__ uint4* part_at(const TwoShotParams& p, int owner, uint32_t epoch,
                                          int source, int index) {
    const int64_t row = int64_t{source} * p.rows_of_owner + index;
    return inbox_at(p.peers, owner, epoch) + row * (p.norm.hidden_size / 8);
}
__device__ __forceinline__ uint4* sum_at(const TwoShotParams& p, int reader, uint32_t epoch,
                                         int row) {
    return part_at(p, reader, epoch, p.peers.size, row);
}

// Some vectors of a row that this rank owns, as a warp sums and sends them.
template <typename T>
class Unit {
  public:
    // first: vector of the row.
    __device__ __forceinline__ Unit(const TwoShotParams& p, uint32_t epoch, int index, int first)
        : p_(p),
          epoch_(epoch),
          num_vecs_(static_cast<int>(p.norm.hidden_size / 8)),
          first_(first + static_cast<int>(threadIdx.x) % kWarpSize),
          index_(index),
          row_(rows_of(p, p.peers.rank).first + index) {}

    __device__ __forceinline__ void sum() {
#pragma unroll
        for (int i = 0; i < kUnitVecsOfLane; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) h_[i][j] = 0.0f;
        }
        add(p_.norm.residual, row_);
        add(p_.bias, 0);
        wait_for_parts();
        for (int source = 0; source < p_.peers.size; source += kTogether) add_parts(source);
    }

    // To inboxes that are free: all ranks have sent parts of this call, and so begun it.
    __device__ __forceinline__ void send() const {
        for (int turn = 1; turn <= p_.peers.size; ++turn) {
            uint4* to = sum_at(p_, (p_.peers.rank + turn) % p_.peers.size, epoch_, row_);
            each_vec([&](int i, int v) { store_relaxed(to + v, never_zero(pack<T>(h_[i]))); });
        }
    }

  private:
    template <typename Visit>
    __device__ __forceinline__ void each_vec(const Visit& visit) const {
#pragma unroll
        for (int i = 0; i < kUnitVecsOfLane; ++i) {
            const int v = first_ + i * kWarpSize;
            if (v < num_vecs_) visit(i, v);
        }
    }

    __device__ __forceinline__ void add(int i, const uint4& words) {
#pragma unroll
        for (int j = 0; j < 8; ++j) h_[i][j] += element<T>(words, j);
    }

    __device__ __forceinline__ void add(const void* rows, int64_t row) {
        if (rows == nullptr) return;
        const auto* from = static_cast<const uint4*>(rows) + row * num_vecs_;
        each_vec([&](int i, int v) { add(i, load_coherent(from + v)); });
    }

    __device__ __forceinline__ bool is_here(int source) const {
        return source == p_.peers.rank && p_.own_part != nullptr;
    }

    __device__ __forceinline__ uint4* part(int source) const {
        return part_at(p_, p_.peers.rank, epoch_, source, index_);
    }

    // A lane a source, lest all lanes read all along.
    __device__ __forceinline__ void wait_for_parts() const {
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
        if (lane < p_.peers.size && !is_here(lane)) {
            wait_for_word(p_.peers, lane, part(lane) + first_ - lane);
        }
        __syncwarp();
    }

    // What has come of a rank's part, if it is another's.
    __device__ __forceinline__ bool look(int source, uint4 (&words)[kUnitVecsOfLane]) const {
        bool is_whole = true;
        const uint4* from = part(source);
        each_vec([&](int i, int v) {
            words[i] = load_relaxed(from + v);
            is_whole = is_whole && has_come(words[i]);
        });
        return is_whole;
    }

    // Of ranks from `base` on.
    __device__ __forceinline__ void add_parts(int base) {
        uint4 words[kTogether][kUnitVecsOfLane];
        bool is_whole[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            is_whole[k] = base + k >= p_.peers.size || is_here(base + k) ||
                          look(base + k, words[k]);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int source = base + k;
            if (source >= p_.peers.size) continue;
            if (is_here(source)) {
                add(p_.own_part, row_);
                continue;
            }
            Patience patience;
            while (!is_whole[k]) {
                const auto* at = reinterpret_cast<const uint32_t*>(part(source) + first_);
                if (patience.has_ended(p_.peers, source, at, 0, 1)) break;
                is_whole[k] = look(source, words[k]);
            }
            uint4* from = part(source);
            each_vec([&](int i, int v) {
                add(i, words[k][i]);
                from[v] = uint4{};  // for the next call but one
            });
        }
    }

    const TwoShotParams& p_;
    const uint32_t epoch_;
    const int num_vecs_, first_, index_, row_;
    float h_[kUnitVecsOfLane][8];
};

}  // namespace bytetx::comm
