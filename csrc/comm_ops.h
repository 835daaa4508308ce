// Ops that several GPUs do together: the part of ops.h that only cuda implements, in comm/.
#pragma once

#include <array>
#include <cstdint>

#include "ops.h"

namespace bytetx {

// Memory of a group of GPUs that share a model's layers: every rank's buffer and flag words, as
// addresses on this device. All ranks make the same calls, with the same sizes, in the same order.
constexpr int kMaxPeers = 8;

// A wait for another rank that took too long; its kernel has trapped.
struct PeerFault {
    int32_t is_set, rank, source,
        flag;  // flag: word of `flags` of `rank`, which `source` counts in
    uint32_t seen, expected;
};

// The host, where it knows that a rank is gone, sets this word of `epochs`: kernels that wait then
// go on without what they wait for, so that the device can be used on. Their results are wrong.
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

// Ranks own rows row_offsets[rank] to row_offsets[rank + 1] of m; any numbers that do not fall.
using RowOffsets = std::array<int64_t, kMaxPeers + 1>;

// cuda only. d = act(rows b^T + bias) of everyone's rows. A quarter of peers' buffers holds
// them: (m + 128) * k elements.
struct AllGatherGemmParams {
    LinearParams linear;  // a: this rank's rows; m: rows of all; no residual, no split-k
    PeerMemory peers;
    RowOffsets row_offsets;
};

void all_gather_gemm(const AllGatherGemmParams& p, const Launch& launch);

// cuda only. h = sum over ranks (a b^T + partial) + bias + residual, in f32 and in the order of
// ranks; norm.sum_out = h, norm.out = its norm. gemm_reduce_scatter: of this rank's rows, so norm
// has those alone; a quarter of the buffers holds size * (its most rows) * n elements.
// gemm_all_reduce: of all rows, on every rank, bit for bit the same; half of the staging buffer
// holds size * m * n elements, or, of tilings whose name begins with dealt-, what
// all_reduce_two_shot needs.
struct GemmSumParams {
    LinearParams linear;  // residual: partial, or null; no bias, no activation; d is not used
    NormParams norm;      // x is not used; residual, weight as there; total_tokens: rows summed
    const void* bias;     // [n], or null for none
    PeerMemory peers;
    RowOffsets row_offsets;  // gemm_reduce_scatter alone goes by them
    bool is_rms;
    // gemm_reduce_scatter: whether tiles of this rank's rows add the others' to their products, in
    // place of what sums all; then residual comes before and its own product after the other ranks'
    // parts.
    bool adds_parts = false;
};

// Tilings that gemm_all_reduce chooses from; linear.tiling is an index into them. The other ops
// take those of linear() that have 128 rows.
int32_t num_gemm_all_reduce_tilings();
LinearTiling gemm_all_reduce_tiling(int32_t index);

void gemm_reduce_scatter(const GemmSumParams& p, const Launch& launch);
void gemm_all_reduce(const GemmSumParams& p, const Launch& launch);

// cuda only. As gemm_all_reduce, of a product that is there: linear.residual; a, b and k are not
// used.
void all_reduce_one_shot(const GemmSumParams& p, const Launch& launch);
// The same in two exchanges: a row's owner, m / size rows rounded up each, sums it for all. Half of
// the staging buffer holds all ranks' parts of an owner's rows, and m rows of sums.
void all_reduce_two_shot(const GemmSumParams& p, const Launch& launch);

// Rows that copy engines move beside cuBLAS's GEMMs. After a barrier of all ranks each sends one
// copy to every other rank, on a stream for copies, and waits for theirs. A copy may go in two
// pieces, of which the first is announced as the early one.
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
    bool is_early;
};
void send_copy(const SendCopyParams& p, const Launch& launch);

struct WaitCopiesParams {
    PeerMemory peers;
    uint32_t sources;  // a bit for each rank that is waited for
    bool is_early;
};
void wait_copies(const WaitCopiesParams& p, const Launch& launch);

// As the second half of gemm_reduce_scatter, of parts that have come: linear.residual, [size, m,
// n].
void sum_copies(const GemmSumParams& p, const Launch& launch);

// cuda only. d = a b^T + bias + residual + sum over the other ranks of parts[rank], in f32 and in
// this order: of some of this rank's rows, behind whose products is added what has come of them.
struct GemmAddPartsParams {
    LinearParams linear;  // tiling: 128x128 or 128x192; no activation, no split-k
    const void* parts;    // [size, part_rows, n], the first m rows of each; this rank's is not read
    int64_t part_rows;
    int32_t rank, size;
};

void gemm_add_parts(const GemmAddPartsParams& p, const Launch& launch);

}  // namespace bytetx
