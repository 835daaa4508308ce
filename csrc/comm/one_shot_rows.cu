// The all-reduce behind a GEMM that stores nothing elsewhere: the first half, whose second is the
// sum of sum_staging.cu, with bias, residual and norm.
//
//   staging buffer of every other rank [this rank] = partial                             partial
//   [m, n], f16 or bf16
//
// For numbers of rows at which cuBLAS's or linear()'s GEMM beats those of gemm_one_shot.cu by more
// than a pass over the product costs. A thread takes 16 bytes a time, four in flight, to every
// rank; words come one by one (never_zero in peers.cuh), so sums begin while the rest is on its
// way. Bytes: m * n * 2 over each link, as much through L2; bound by the links, up to some 2 MB by
// latency.
#include <stdexcept>
#include <string>

#include "comm/comm_tilings.cuh"
#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "common/check.cuh"
#include "common/launch.cuh"

namespace bytetx {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // vectors of a thread

struct PushRowsParams {
    const uint4* partial;
    comm::Peers peers;
    int64_t num_vecs;
};

__global__ void __launch_bounds__(kThreads)
    one_shot_rows_kernel(const __grid_constant__ PushRowsParams p) {
    wait_for_prior_kernel();
    // Only now: what follows relies on all kernels before this one having ended (sum_rows.cuh).
    release_next_kernel();
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kSumEpoch);
    if (blockIdx.x == 0 && threadIdx.x == 32) comm::begin_sum(p.peers, epoch);
    if (threadIdx.x < 32) comm::wait_for_slots(p.peers, epoch);
    __syncthreads();
    const int64_t step = int64_t{gridDim.x} * kThreads;
    const int64_t own_place = p.peers.rank * p.num_vecs;
    for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < p.num_vecs;
         first += kInFlight * step) {
        uint4 words[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            words[i] = __ldcg(p.partial + min(first + i * step, p.num_vecs - 1));
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) words[i] = comm::never_zero(words[i]);
        for (int turn = 1; turn < p.peers.size; ++turn) {
            const int peer = (p.peers.rank + turn) % p.peers.size;
            uint4* staging = comm::staging_at(p.peers, peer, epoch) + own_place;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int64_t place = first + i * step;
                if (place < p.num_vecs) comm::store_relaxed(staging + place, words[i]);
            }
        }
    }
}

}  // namespace

void all_reduce_one_shot(const GemmSumParams& p, const Launch& launch) {
    const LinearParams& o = p.linear;
    comm::check_sum("all_reduce_one_shot", p, o.m * p.peers.size, o.m,
                    comm::staging_bytes(p.peers));
    if (o.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    const int64_t num_vecs = o.m * o.n / 8;
    launch_kernel(
        one_shot_rows_kernel,
        {dim3(comm::kSendingCtas), dim3(kThreads), 0, stream, comm::kSendingCluster},
        PushRowsParams{static_cast<const uint4*>(o.residual), comm::make_peers(p.peers), num_vecs});
    comm::launch_sum_staging(p, o.residual, stream);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
