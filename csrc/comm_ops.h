// Ops that communicate between GPUs: the part of ops.h that only cuda implements, in comm/.
#pragma once

#include <array>
#include <cstdint>

#include "ops.h"

namespace bytetx {

// Memory of a tensor-parallel group: every rank's buffer and flag words, as addresses on this
// device. All ranks make the same calls, with the same sizes, in the same order.
constexpr int kMaxPeers = 8;

// A wait for another rank that timed out; its kernel has trapped.
struct PeerFault {
    int32_t is_set, rank, source;
    int32_t flag;  // index into `flags` of `rank`; the word that `source` counts in
    uint32_t seen, expected;
};

// The host sets this word of `epochs` when it knows that a rank is gone. Kernels then stop waiting,
// so that the device remains usable; their results are wrong.
constexpr int kGivenUpWord = 8;

struct PeerMemory {
    void* buffers[kMaxPeers];    // buffer_bytes each, 1024-byte aligned
    uint32_t* flags[kMaxPeers];  // num_flags words each, zero before the first call
    uint32_t* epochs;            // 16 words of this device alone, zero before the first call
    int64_t buffer_bytes;
    int64_t num_flags;       // 32768, and a staging buffer: partial sums of gemm_all_reduce, twice
    PeerFault* fault;        // in host memory that the device can write, zero at first; or null
    int64_t timeout_cycles;  // that a kernel waits for another rank before it traps
    int32_t rank;
    int32_t size;
};

// Rank r owns rows row_offsets[r] to row_offsets[r + 1] of m; the offsets must not decrease.
using RowOffsets = std::array<int64_t, kMaxPeers + 1>;

// cuda only. d = act(rows b^T + bias), rows: those of all ranks. A quarter of a buffer holds them:
// (m + 128) * k elements.
struct AllGatherGemmParams {
    LinearParams linear;  // a: this rank's rows; m: rows of all ranks; no residual, no split-k
    PeerMemory peers;
    RowOffsets row_offsets;
};

void all_gather_gemm(const AllGatherGemmParams& p, const Launch& launch);

// cuda only. h = sum over ranks (a b^T + partial) + bias + residual, in f32 and in the order of
// ranks; norm.sum_out = h, norm.out = norm(h).
// gemm_reduce_scatter: norm has this rank's rows only. A quarter of a buffer holds
// size * (most rows of a rank) * n elements.
// gemm_all_reduce: every rank has all rows, and the results are bitwise the same. With one
// exchange, half of the staging buffer holds size * m * n elements (tilings for large m: a quarter
// of a buffer); with two, it holds what all_reduce_two_shot needs.
struct GemmSumParams {
    LinearParams linear;  // residual: partial, or null; no bias, no activation; d is not used
    NormParams norm;      // x is not used; residual, weight as there; total_tokens: rows summed
    const void* bias;     // [n], or null for none
    PeerMemory peers;
    RowOffsets row_offsets;  // for gemm_reduce_scatter; the others have all rows: 0, ..., 0, m
    bool is_rms;
    // gemm_reduce_scatter: the tiles of this rank's rows add the other ranks' partial sums, instead
    // of a kernel after the GEMM. The order is then: this rank's product with the bias, the
    // residual, the other ranks' parts by ascending rank. No partial.
    bool fuse_reduce = false;
    // gemm_all_reduce: two exchanges instead of one. A tile goes to the owner of its rows, who
    // sends the sum to all. Tilings for small m only.
    bool is_two_shot = false;
};

// The tilings of gemm_all_reduce; linear.tiling is an index into them. all_gather_gemm and
// gemm_reduce_scatter take linear()'s 128x192 and 128x128.
int32_t num_gemm_all_reduce_tilings();
LinearTiling gemm_all_reduce_tiling(int32_t index);

void gemm_reduce_scatter(const GemmSumParams& p, const Launch& launch);
void gemm_all_reduce(const GemmSumParams& p, const Launch& launch);

// cuda only. As gemm_all_reduce, of the finished product linear.residual; a, b and k are not used.
void all_reduce_one_shot(const GemmSumParams& p, const Launch& launch);
// The same with two exchanges: each rank sums ceil(m / size) rows for all. Half of the staging
// buffer holds all ranks' parts of these rows, and m rows of sums.
void all_reduce_two_shot(const GemmSumParams& p, const Launch& launch);

// Copy engines move rows while cuBLAS multiplies. After a barrier of all ranks, each rank sends one
// copy to every other rank, on a stream for copies, and waits for theirs.
struct BarrierParams {
    PeerMemory peers;
};
void barrier(const BarrierParams& p, const Launch& launch);

struct SendCopyParams {
    PeerMemory peers;
    int32_t to;        // the rank that receives
    void* place;       // in its memory
    const void* rows;  // bytes
    int64_t bytes;
};
void send_copy(const SendCopyParams& p, const Launch& launch);

struct WaitCopiesParams {
    PeerMemory peers;
    uint32_t sources;  // a bit for each rank that is waited for
};
void wait_copies(const WaitCopiesParams& p, const Launch& launch);

// The sum of gemm_reduce_scatter, of parts that have arrived: linear.residual, [size, m, n].
void sum_copies(const GemmSumParams& p, const Launch& launch);

}  // namespace bytetx
