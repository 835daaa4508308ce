// Pieces of the decode kernel: a warp's 16 keys in shared memory, and mma.sync on them.
#pragma once

#include <cstdint>

#include "cache_ops.h"
#include "cuda/attention_math.cuh"
#include "cuda/mma.cuh"

namespace bytetx::paged {

// A row's running maximum is raised only when a score exceeds it by this much (in powers of two):
// weights stay at most 2^8, and most rescales disappear.
constexpr float kMaxSlack = 8.0f;

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

// Scores beyond what a factor makes of products: soft cap, ALiBi.
struct ScoreChange {
    const float* alibi_slopes;  // [num_heads], or null
    float softcap;              // 0: none
    Softcap capped;             // to powers of two

    __device__ __forceinline__ bool is_any() const {
        return softcap > 0.0f || alibi_slopes != nullptr;
    }
    // scale: to powers of two.
    __device__ __forceinline__ float cap(float product, float scale) const {
        return softcap > 0.0f ? capped(product) : product * scale;
    }
    // Slope of a head, for powers of two.
    __device__ __forceinline__ float slope(int head) const {
        return alibi_slopes == nullptr ? 0.0f : __ldg(alibi_slopes + head) * kLog2e;
    }
};

inline ScoreChange score_change(const PlannedPagedAttentionParams& p) {
    ScoreChange change{p.alibi_slopes, p.softcap, {}};
    if (p.softcap > 0.0f) {
        change.capped = {2.0f * kLog2e * p.softmax_scale / p.softcap, p.softcap * kLog2e};
    }
    return change;
}

// 16 bytes to shared memory, of which the first `bytes` (0 or 16) are read and the rest are zeros.
__device__ __forceinline__ void copy_or_zero(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// Byte offset of a 16-byte piece in rows of kDim elements, permuted so that the same piece of eight
// neighbouring rows, which is what one matrix load reads, lies in different banks.
template <int kDim>
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
    constexpr int kPieces = kDim / 8;
    static_assert(kPieces % 4 == 0);
    const int turn = kPieces % 8 == 0 ? row & 7 : (row >> 1) & 3;
    return (row * kPieces + (piece ^ turn)) * 16;
}

}  // namespace bytetx::paged
