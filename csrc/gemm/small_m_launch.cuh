// The launch of tilings for small m: how many stages a CTA has, how many CTAs an SM.
#pragma once

#include "gemm/launch.cuh"

namespace bytetx::gemm {

constexpr int kSmemBytesOfTwo = 113 * 1024;  // each of two CTAs of an SM has so much
constexpr int kFewestStages = 3;             // that hide a trip to L2
// Measured in chains of BERT's layers on an H200, not in chains of one product: with more stages
// a text of 128 tokens takes 283 us instead of 276, with CTAs that share an SM one of 32 takes 243
// instead of 226.
constexpr int kMostBytesOfStages = 165 * 1024;
constexpr int kSmemBytesOfOne = 116 * 1024;  // at least, where an SM should hold one CTA

// Whether an SM should hold two CTAs: there are more than SMs. Clusters of three and more leave
// some of those unused, an H200's of four and eight 12 of 132.
inline bool are_crowded(int ctas, int ranks) {
    return ctas > (ranks > 2 ? num_sms() * 10 / 11 : num_sms());
}

struct SmallMShape {
    int num_stages, smem_bytes;
};

// A stage for every block of a CTA, up to kMostBytesOfStages: weights that have one are fetched
// before the kernel before has ended. more_bytes: what a CTA has behind the stages.
template <typename C>
SmallMShape small_m_shape(int ctas, int cluster_ctas, int blocks, int more_bytes) {
    constexpr int kStage = C::kStageBytes, kHead = LaunchStages<C>::kHeadBytes;
    const int wanted = std::min(C::kStages, blocks);
    const auto stages_in = [&](int bytes) {
        return std::min(wanted, (bytes - kHead - more_bytes) / kStage);
    };
    int num_stages = std::min(stages_in(kMostSmemBytes), std::max(2, kMostBytesOfStages / kStage));
    const bool is_crowded = are_crowded(ctas, cluster_ctas);
    if (is_crowded) {
        const int shallow = stages_in(kSmemBytesOfTwo);
        if (shallow >= std::min(wanted, kFewestStages)) num_stages = shallow;
    }
    const int used = kHead + num_stages * kStage + more_bytes;
    return {num_stages, std::max(used, is_crowded ? 0 : kSmemBytesOfOne)};
}

// `shares` CTAs share a tile's k, as a cluster or each on its own. more_bytes: as small_m_shape's.
template <typename K>
void launch_one_tile(typename K::Params& p, const Matrix& a, int shares, bool is_cluster,
                     int more_bytes, cudaStream_t stream) {
    using C = typename K::C;
    static_assert(sizeof(typename K::Smem) <= LaunchStages<C>::kHeadBytes);
    const int a_rows = static_cast<int>(std::min<int64_t>(C::kTileM, (a.rows + 7) / 8 * 8));
    p.a = make_map(a, a_rows);
    const int ctas = p.tiles_m * p.tiles_n * shares, ranks = is_cluster ? shares : 1;
    const int blocks = num_tiles(p.num_k_blocks, shares);  // most k blocks of one CTA
    const auto shape = small_m_shape<C>(ctas, ranks, blocks, more_bytes);
    p.stages = {shape.num_stages, (a_rows + C::kTileN) * kBlockK * kElementBytes};
    allow_smem_once<K::kFunction>(kMostSmemBytes);
    launch_kernel(K::kFunction, {dim3(ctas), dim3(C::kThreads), shape.smem_bytes, stream, ranks},
                  p);
}

}  // namespace bytetx::gemm
