// all_reduce_one_shot after a plain GEMM: every rank sends its product to all others;
// sum_staging.cu sums the parts and adds bias, residual and norm.
//
//   staging buffer of every other rank [this rank] = partial       partial [m, n], f16 or bf16
//
// For numbers of rows at which the GEMM of cuBLAS or linear() beats those of one_shot_launch.cuh by
// more than a pass over the product costs. A thread sends 16 bytes at a time, four in flight, to
// every rank. Each word signals its own arrival (never_zero in peers.cuh), so the sum begins while
// the rest is in flight. Bytes: m * n * 2 over each link and as much through L2; bound by the
// links, up to some 2 MB by latency.
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

struct OneShotRowsParams {
    const uint4* partial;
    comm::Peers peers;
    int64_t num_vecs;
};

__global__ void __launch_bounds__(kThreads)
    one_shot_rows_kernel(const __grid_constant__ OneShotRowsParams p) {
    wait_for_prior_kernel();
    // Not earlier: the next kernel relies on all kernels before this one having ended.
    release_next_kernel();
    const uint32_t epoch = comm::this_epoch(p.peers, comm::kSumEpoch);
    if (blockIdx.x == 0 && threadIdx.x == 32) comm::begin_sum(p.peers, epoch);
    if (threadIdx.x < 32) comm::wait_for_slots(p.peers, epoch);
    __syncthreads();
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    const int64_t own_place = p.peers.rank * p.num_vecs;
    for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < p.num_vecs;
         first += kInFlight * stride) {
        uint4 words[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            words[i] = __ldcg(p.partial + min(first + i * stride, p.num_vecs - 1));
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) words[i] = comm::never_zero(words[i]);
        for (int step = 1; step < p.peers.size; ++step) {
            const int peer = (p.peers.rank + step) % p.peers.size;
            uint4* staging = comm::staging_at(p.peers, peer, epoch) + own_place;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int64_t place = first + i * stride;
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
    launch_kernel(one_shot_rows_kernel,
                  {dim3(comm::kSendingCtas), dim3(kThreads), 0, stream, comm::kSendingCluster},
                  OneShotRowsParams{static_cast<const uint4*>(o.residual),
                                    comm::make_peers(p.peers), num_vecs});
    comm::launch_sum_staging(p, o.residual, stream);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
