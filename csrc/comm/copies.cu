// Barrier and flags of the transport by copy engines: for GEMMs so long that the GPU runs at its
// power limit, where cuBLAS gains more than the fused kernels hide.
//
// A call: a barrier of all ranks, after which no rank reads the copies of the call before; copies
// run beside the GEMM of the local rows, and after each copy the epoch of the call is written to a
// flag of the rank that waits for it. One warp each, bound by latency. Source: Flux (arXiv
// 2406.06858), section 4.3.
#include <stdexcept>
#include <string>

#include "comm/comm_tilings.cuh"
#include "comm/peers.cuh"
#include "comm/sum_rows.cuh"
#include "common/check.cuh"
#include "common/launch.cuh"

namespace bytetx {
namespace {

constexpr int kThreads = 32;
static_assert(kMaxPeers <= kThreads);

// Counts the call, sets a flag on every rank, and waits for the flags of all ranks.
__global__ void __launch_bounds__(kThreads) barrier_kernel(const __grid_constant__ comm::Peers p) {
    wait_for_prior_kernel();
    const int peer = static_cast<int>(threadIdx.x);
    const uint32_t epoch = comm::load_acquire(p.epochs + comm::kCopyEpoch) + 1;
    __syncwarp();
    if (peer == 0) p.epochs[comm::kCopyEpoch] = epoch;
    if (peer < p.size) {
        comm::store_release(p.flags[peer] + comm::kBarrier + p.rank, epoch);
        comm::wait_for(p, peer, p.flags[p.rank] + comm::kBarrier + peer, epoch);
    }
}

// Waits for this call's copies from the ranks whose bits are set.
__global__ void __launch_bounds__(kThreads)
    wait_copies_kernel(const __grid_constant__ comm::Peers p, uint32_t sources) {
    wait_for_prior_kernel();
    const int peer = static_cast<int>(threadIdx.x);
    const uint32_t epoch = comm::load_acquire(p.epochs + comm::kCopyEpoch);
    if (sources >> peer & 1)
        comm::wait_for(p, peer, p.flags[p.rank] + comm::kArrived + peer, epoch);
}

template <typename... Arguments>
void launch_warp(void (*kernel)(comm::Peers, Arguments...), const PeerMemory& peers,
                 const Launch& launch, Arguments... arguments) {
    const DeviceGuard guard(launch.device);
    launch_kernel(kernel, {dim3(1), dim3(kThreads), 0, static_cast<cudaStream_t>(launch.stream)},
                  comm::make_peers(peers), arguments...);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void barrier(const BarrierParams& p, const Launch& launch) {
    launch_warp(barrier_kernel, p.peers, launch);
}

void wait_copies(const WaitCopiesParams& p, const Launch& launch) {
    const uint32_t others = ((1u << p.peers.size) - 1) & ~(1u << p.peers.rank);
    if ((p.sources & ~others) != 0) {
        throw std::invalid_argument("copies come from the other ranks of " +
                                    std::to_string(p.peers.size) + ", got the mask " +
                                    std::to_string(p.sources));
    }
    launch_warp(wait_copies_kernel, p.peers, launch, p.sources);
}

void send_copy(const SendCopyParams& p, const Launch& launch) {
    const PeerMemory& peers = p.peers;
    if (p.to < 0 || p.to >= peers.size) {
        throw std::invalid_argument("a copy goes to ranks 0 to " + std::to_string(peers.size - 1) +
                                    ", got " + std::to_string(p.to));
    }
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (p.bytes > 0) {
        BYTETX_CUDA_CHECK(cudaMemcpyAsync(p.place, p.rows, static_cast<size_t>(p.bytes),
                                          cudaMemcpyDefault, stream));
    }
    BYTETX_CUDA_CHECK(cudaMemcpyAsync(peers.flags[p.to] + comm::kArrived + peers.rank,
                                      peers.epochs + comm::kCopyEpoch, sizeof(uint32_t),
                                      cudaMemcpyDefault, stream));
}

void sum_copies(const GemmSumParams& p, const Launch& launch) {
    const LinearParams& o = p.linear;
    comm::check_sum("sum_copies", p, o.m * p.peers.size, o.m, INT64_MAX);
    if (o.m == 0) return;
    const DeviceGuard guard(launch.device);
    comm::launch_sum(p, {.parts = o.residual, .num_rows = static_cast<int>(o.m)},
                     static_cast<cudaStream_t>(launch.stream));
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
