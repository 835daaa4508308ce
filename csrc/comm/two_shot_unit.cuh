// The unit of work of an all-reduce with two exchanges (two_shot.cu): where parts and sums are in a
// staging buffer, and how a warp sums some vectors of a row and sends them to all.
#pragma once

#include "comm/staging_row.cuh"

namespace bytetx::comm {

constexpr int kUnitVecs = 64;  // vectors of a row that a warp sums at once
using UnitTiling = RowTiling<kWarpSize, 1, kUnitVecs / kWarpSize>;
constexpr int kTogether = 4;  // ranks' parts that are read together

struct TwoShotParams : SumParams {
    const void* own_part;  // [m, n], or null where it is in the staging buffer as well
    int rows_of_owner;     // rows of each owner but the last ones
    bool has_roles;        // half of the SMs sum and send before they normalize
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
    return staging_at(p.peers, owner, epoch) + row * (p.norm.hidden_size / 8);
}
__device__ __forceinline__ uint4* sum_at(const TwoShotParams& p, int reader, uint32_t epoch,
                                         int row) {
    return part_at(p, reader, epoch, p.peers.size, row);
}

// Some vectors of a row that this rank owns, as a warp sums and sends them: a row of UnitTiling.
template <typename T>
class Unit {
  public:
    // first: vector of the row.
    __device__ __forceinline__ Unit(const TwoShotParams& p, uint32_t epoch, int index, int first)
        : p_(p),
          epoch_(epoch),
          first_(first),
          row_vecs_(static_cast<int>(p.norm.hidden_size / 8)),
          num_vecs_(row_vecs_ - first),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize),
          index_(index),
          row_(rows_of(p, p.peers.rank).first + index) {}

    __device__ __forceinline__ void sum() {
        clear_row<T, UnitTiling>(h_);
        add(p_.norm.residual, row_);
        add(p_.bias, 0);
        wait_for_parts();
        for (int source = 0; source < p_.peers.size; source += kTogether) add_parts(source);
    }

    // The staging buffers are free: all ranks have sent parts of this call, so they have begun it.
    __device__ __forceinline__ void send() const {
        for (int step = 1; step <= p_.peers.size; ++step) {
            const int reader = (p_.peers.rank + step) % p_.peers.size;
            uint4* to = sum_at(p_, reader, epoch_, row_) + first_ + lane_;
#pragma unroll
            for (int i = 0; i < UnitTiling::kVecsPerThread; ++i) {
                const int v = i * kWarpSize;
                if (lane_ + v < num_vecs_) store_relaxed(to + v, never_zero(pack<T>(h_[i])));
            }
        }
    }

  private:
    using Words = RawRow<UnitTiling>;

    __device__ __forceinline__ void add(const void* rows, int64_t row) {
        if (rows == nullptr) return;
        Words words;
        words.load(static_cast<const uint4*>(rows) + row * row_vecs_ + first_, 0, lane_, num_vecs_,
                   load_coherent);
        add_row<T, UnitTiling>(h_, words);
    }

    __device__ __forceinline__ bool is_here(int source) const {
        return source == p_.peers.rank && p_.own_part != nullptr;
    }

    __device__ __forceinline__ uint4* part(int source) const {
        return part_at(p_, p_.peers.rank, epoch_, source, index_) + first_;
    }

    // One lane a source, so that not all lanes poll.
    __device__ __forceinline__ void wait_for_parts() const {
        if (lane_ < p_.peers.size && !is_here(lane_)) {
            wait_for_word(p_.peers, lane_, part(lane_));
        }
        __syncwarp();
    }

    // Adds the parts of up to kTogether ranks from `base` on.
    __device__ __forceinline__ void add_parts(int base) {
        Words parts[kTogether];
        bool is_whole[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int source = base + k;
            is_whole[k] = source >= p_.peers.size || is_here(source) ||
                          peek<UnitTiling>(parts[k], part(source) + lane_, lane_, num_vecs_);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int source = base + k;
            if (source >= p_.peers.size) continue;
            if (is_here(source)) {
                add(p_.own_part, row_);
                continue;
            }
            uint4* first = part(source) + lane_;
            wait_for_row<UnitTiling>(p_.peers, source, parts[k], is_whole[k], first, lane_,
                                     num_vecs_);
            add_row<T, UnitTiling>(h_, parts[k]);
            clear_staging<UnitTiling>(first, lane_, num_vecs_);
        }
    }

    const TwoShotParams& p_;
    const uint32_t epoch_;
    const int first_, row_vecs_, num_vecs_, lane_, index_, row_;
    RowRegisters<T, UnitTiling> h_;
};

}  // namespace bytetx::comm
