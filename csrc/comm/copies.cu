// What ranks say to each other where copy engines move the rows: for GEMMs so long that cuBLAS's
// are faster by more than what the fused kernels hide, for those run at the power limit.
//
// A call: all ranks meet, which says that nobody reads what copies brought in the call before;
// copies go out beside the GEMM of the rows that are here, and behind each the call's number, to
// the rank that waits for it. One warp each, bounded by latency. Source: Flux (arXiv 2406.06858),
// section 4.3.
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

// Counts the call, tells all ranks, and waits until they have come as far.
__global__ void __launch_bounds__(kThreads) meet_kernel(const __grid_constant__ comm::Peers p) {
    wait_for_prior_kernel();
    const int peer = static_cast<int>(threadIdx.x);
    const uint32_t epoch = comm::load_acquire(p.epochs + comm::kCopyEpoch) + 1;
    __syncwarp();
    if (peer == 0) p.epochs[comm::kCopyEpoch] = epoch;
    if (peer < p.size) {
        comm::store_release(p.flags[peer] + comm::kMet + p.rank, epoch);
        comm::wait_for(p, peer, p.flags[p.rank] + comm::kMet + peer, epoch);
    }
}

// Until this call's copies have come of the ranks whose bits are set. flag: kArrived or kEarly.
__global__ void __launch_bounds__(kThreads)
    await_copies_kernel(const __grid_constant__ comm::Peers p, uint32_t sources, int flag) {
    wait_for_prior_kernel();
    const int peer = static_cast<int>(threadIdx.x);
    const uint32_t epoch = comm::load_acquire(p.epochs + comm::kCopyEpoch);
    if (sources >> peer & 1) comm::wait_for(p, peer, p.flags[p.rank] + flag + peer, epoch);
}

template <typename... Arguments>
void launch_warp(void (*kernel)(comm::Peers, Arguments...), const PeerMemory& peers,
                 const Launch& launch, Arguments... arguments) {
    const DeviceGuard guard(launch.device);
    launch_kernel(kernel, {dim3(1), dim3(kThreads), 0, static_cast<cudaStream_t>(launch.stream)},
                  comm::make_peers(peers), arguments...);
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

int flag_of(bool is_early) { return is_early ? comm::kEarly : comm::kArrived; }

}  // namespace

void meet(const PeerMemory& peers, const Launch& launch) {
    launch_warp(meet_kernel, peers, launch);
}

void await_copies(const PeerMemory& peers, uint32_t sources, bool is_early, const Launch& launch) {
    const uint32_t others = ((1u << peers.size) - 1) & ~(1u << peers.rank);
    if ((sources & ~others) != 0) {
        throw std::invalid_argument("copies come from the other ranks of " +
                                    std::to_string(peers.size) + ", got the mask " +
                                    std::to_string(sources));
    }
    launch_warp(await_copies_kernel, peers, launch, sources, flag_of(is_early));
}

void send_copy(const PeerMemory& peers, int32_t to, void* place, const void* rows, int64_t bytes,
               bool is_early, const Launch& launch) {
    if (to < 0 || to >= peers.size) {
        throw std::invalid_argument("a copy goes to ranks 0 to " + std::to_string(peers.size - 1) +
                                    ", got " + std::to_string(to));
    }
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (bytes > 0) {
        BYTETX_CUDA_CHECK(
            cudaMemcpyAsync(place, rows, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
    }
    BYTETX_CUDA_CHECK(cudaMemcpyAsync(peers.flags[to] + flag_of(is_early) + peers.rank,
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
