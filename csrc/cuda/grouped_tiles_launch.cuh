// Many tokens by grouped_linear(): the persistent kernel of large tiles, and its launch.
//
// Two warpgroups multiply, each 64 outputs and all tokens of the tile; weights are operand a, from
// registers, and a block is decoded while the products of the one before run. The CTAs of a pair
// have neighbouring outputs and send each other their half of x. Copies run on into the next tile
// while results are stored. Results leave from registers: matrices of eight tokens and eight
// outputs are turned between lanes, so that four lanes store 32 bytes of a row.
#pragma once

#include <algorithm>

#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "cuda/grouped_codes.cuh"
#include "cuda/grouped_epilogue.cuh"
#include "gemm/launch.cuh"
#include "grouped_ops.h"

namespace bytetx::grouped {

using namespace gemm;

constexpr int kPairOutputs = 256;  // two CTAs have

// Pairs of tiles of outputs, [begin, end).
struct PairRange {
    int begin, end;
};

struct GroupedTiles {
    GroupedLinearParams o;
    ActivationConstants activation;
    ActivationForm form;
    int tiles_m;
    int first_pair, pairs_n;  // pairs of tiles of outputs
    int num_k_blocks;
};

template <typename T, CodeKind kCodeKind, int kTokens>
struct TokenTile {
    using Element = T;
    static constexpr CodeKind kKind = kCodeKind;
    static constexpr int kTileTokens = kTokens;
    static constexpr int kWarpgroups = 2, kThreads = (kWarpgroups + 1) * 128;
    static constexpr int kOutputs = kWarpgroups * kBlockOutputs;  // a CTA has
    static constexpr int kPair = 2;                               // CTAs that share tokens
    static_assert(kPair * kOutputs == kPairOutputs);
    static constexpr int kBlockBytes = Codes<kKind>::kBytes;
    static constexpr int kRowsBytes = kTokens * kBlockFeatures * 2;
    static constexpr int kStageBytes =
        (kRowsBytes + kWarpgroups * kBlockBytes + 1023) / 1024 * 1024;
    // Gates and values that two warps give each other: sums of a lane at a time.
    static constexpr int kGivenSums = 32, kGivenBytes = kWarpgroups * 4 * 32 * kGivenSums * 4;
    static constexpr int kBarrierBytes = 1024, kMostStages = 8;
    static constexpr int kStages =
        std::min(kMostStages, (226 * 1024 - kBarrierBytes - kGivenBytes) / kStageBytes);
    static constexpr int kSmemBytes = 1024 + kBarrierBytes + kStages * kStageBytes + kGivenBytes;
    static constexpr int kCopiers = 1 + kWarpgroups;  // threads that fill a stage
};

// A matrix of 8 rows and 8 columns of 16 bits, of which a lane has two neighbours, turned.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
    return found;
}

// Tokens, eight in each of kNum matrices, and 16 outputs of a warp: a lane has sums of outputs
// lane / 4 and + 8, each of two tokens 2 * (lane % 4) + {0, 1}, in the order of wgmma. residual, d:
// at the first token and output.  left: tokens that there are.
template <typename T, bool kHasResidual, int kNum>
__device__ __forceinline__ void store_turned(float (&x)[kNum][4], int lane, const T* residual, T* d,
                                             int64_t columns, int64_t left) {
    // Even lanes have four of the first eight outputs, odd ones four of the others.
    const bool is_odd = lane % 2 != 0;
    const int64_t offset = lane / 4 * columns + lane % 2 * 8 + lane % 4 / 2 * 4;
    if constexpr (kHasResidual) {
        uint2 both[kNum];
#pragma unroll
        for (int j = 0; j < kNum; ++j) {
            both[j] = {0, 0};
            if (8 * j + lane / 4 < left) {
                both[j] = *reinterpret_cast<const uint2*>(residual + offset + 8 * j * columns);
            }
        }
#pragma unroll
        for (int j = 0; j < kNum; ++j) {
            const uint32_t got = __shfl_xor_sync(0xffffffffu, is_odd ? both[j].x : both[j].y, 1);
            const float2 first = unpack(transposed(is_odd ? got : both[j].x), T{});
            const float2 second = unpack(transposed(is_odd ? both[j].y : got), T{});
            x[j][0] += first.x, x[j][1] += first.y, x[j][2] += second.x, x[j][3] += second.y;
        }
    }
    uint32_t first[kNum], second[kNum], got[kNum];
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        first[j] = transposed(pack(x[j][0], x[j][1], T{}));
        second[j] = transposed(pack(x[j][2], x[j][3], T{}));
    }
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        got[j] = __shfl_xor_sync(0xffffffffu, is_odd ? first[j] : second[j], 1);
    }
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        if (8 * j + lane / 4 >= left) continue;
        *reinterpret_cast<uint2*>(d + offset + 8 * j * columns) =
            is_odd ? make_uint2(got[j], second[j]) : make_uint2(first[j], got[j]);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    grouped_tiles_kernel(const __grid_constant__ CUtensorMap rows,
                         const __grid_constant__ GroupedTiles p) {
    using T = typename C::Element;
    constexpr int kTokens = C::kTileTokens, kStages = C::kStages;
    extern __shared__ uint8_t unaligned[];
    uint8_t* const aligned = unaligned + (1024 - smem_address(unaligned) % 1024) % 1024;
    auto* const full = reinterpret_cast<uint64_t*>(aligned);
    uint64_t* const empty = full + kStages;
    uint8_t* const stages = aligned + C::kBarrierBytes;

    const GroupedLinearParams& o = p.o;
    const int rank = cluster_rank();
    const int pair = static_cast<int>(blockIdx.x) / C::kPair;
    const int num_pairs = static_cast<int>(gridDim.x) / C::kPair;
    const int num_tiles = p.tiles_m * p.pairs_n, num_blocks = p.num_k_blocks;
    struct Place {
        int m, n;  // tiles
    };
    const auto place_of = [&](int tile) {
        // Neighbours are tokens of eight tiles, so that both operands of a wave stay in L2.
        constexpr int kNeighbours = 8;
        const int of_group = kNeighbours * p.pairs_n;
        const int first_m = tile / of_group * kNeighbours;
        const int height = min(kNeighbours, p.tiles_m - first_m);
        const int within = tile % of_group;
        return Place{first_m + within % height, (p.first_pair + within / height) * C::kPair + rank};
    };

    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            Barrier::init(full + i, C::kCopiers);
            Barrier::init(empty + i, C::kWarpgroups * C::kPair);
        }
        fence_barrier_init();
    }
    arrive_in_cluster_relaxed();
    wait_for_cluster();
    release_next_kernel();

    // Calls copy(stage, block, place) where a stage is empty.
    const auto fill_stages = [&](const auto& copy) {
        RingIndex<kStages> at;
        for (int tile = pair; tile < num_tiles; tile += num_pairs) {
            const Place place = place_of(tile);
            for (int block = 0; block < num_blocks; ++block, at.advance()) {
                Barrier::wait(empty + at.index, at.phase ^ 1);
                copy(at.index, block, place);
            }
        }
    };
    const int copier = warp - C::kWarpgroups * 4;
    if (copier >= 0) {
        give_registers<40>();
        if (copier == 0 && lane == 0) {
            prefetch_map(&rows);
            wait_for_prior_kernel();
            fill_stages([&](int stage, int block, Place place) {
                constexpr int kShare = kTokens / C::kPair;
                constexpr uint16_t kBoth = (1 << C::kPair) - 1;
                Barrier::arrive_and_expect(full + stage, C::kRowsBytes);
                load_box_to(kBoth, &rows, full + stage, L2Policy::evict_last,
                            stages + stage * C::kStageBytes + rank * (C::kRowsBytes / C::kPair),
                            block * kBlockFeatures, place.m * kTokens + rank * kShare);
            });
        } else if (copier > 0 && copier <= C::kWarpgroups && lane == 0) {
            const int blocks_n = static_cast<int>((o.n + kBlockOutputs - 1) / kBlockOutputs);
            fill_stages([&](int stage, int block, Place place) {
                // Beyond n it is the last block again, whose sums are not stored.
                const int block_n = min(place.n * C::kWarpgroups + copier - 1, blocks_n - 1);
                Barrier::arrive_and_expect(full + stage, C::kBlockBytes);
                load_bytes(
                    o.codes + (int64_t{block_n} * num_blocks + block) * C::kBlockBytes,
                    full + stage,
                    stages + stage * C::kStageBytes + C::kRowsBytes + (copier - 1) * C::kBlockBytes,
                    C::kBlockBytes);
            });
            wait_for_prior_kernel();
        }
    } else {
        take_registers<232>();
        wait_for_prior_kernel();
        const int warpgroup = warp / 4, strip = warp % 4;
        const auto release = [&](int stage) {
            if (threadIdx.x % 128 < C::kPair) Barrier::arrive_at(empty + stage, threadIdx.x % 128);
        };
        RingIndex<kStages> at;
        Sums<kTokens / 2> sums;
        for (int tile = pair; tile < num_tiles; tile += num_pairs) {
            const Place place = place_of(tile);
            sums.clear();
            uint32_t weights[2][16];
            int last_stage = 0;
            // The products of a block run while the next one is decoded.
            const auto multiply = [&](uint32_t(&a)[16], int i) {
                Barrier::wait(full + at.index, at.phase);
                asm volatile("" ::: "memory");  // the stage is read after this
                const uint8_t* stage = stages + at.index * C::kStageBytes;
                weights_of_block<T, C::kKind>(stage + C::kRowsBytes + warpgroup * C::kBlockBytes,
                                              strip, lane, o.form, a);
                const Operand x = operand_at<128>(stage, 64);
                begin_products();
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    multiply_add<T, kTokens, false>(sums.x, a + 4 * j, x + 2 * j, 1);
                }
                commit_products();
                wait_for_products<1>();
                if (i > 0) release(last_stage);  // the products of the stage before have ended
                last_stage = at.index;
                at.advance();
            };
            int i = 0;
            for (; i + 1 < num_blocks; i += 2) {
                multiply(weights[0], i);
                multiply(weights[1], i + 1);
            }
            if (i < num_blocks) multiply(weights[0], i);
            wait_for_products<0>();
            sums.pin();
            release(last_stage);

            const int64_t block_n = int64_t{place.n} * C::kWarpgroups + warpgroup;
            const int64_t output = block_n * kBlockOutputs + strip * kStripOutputs;
            if (output >= o.n) continue;  // n is whole strips; gated, whole blocks
            const int64_t token = int64_t{place.m} * kTokens;
            float factor[2], bias[2] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int64_t own = output + lane / 4 + 8 * h;
                factor[h] = o.factor[own];
                if (o.bias != nullptr) {
                    bias[h] = static_cast<float>(static_cast<const T*>(o.bias)[own]);
                }
            }
            const auto scaled = [&](int j, float(&x)[4]) {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    x[e] = fmaf(sums(4 * j + e), factor[e / 2], bias[e / 2]);
            };
            T* const d = static_cast<T*>(o.d);
            constexpr int kStored = 4;  // matrices of eight tokens at a time
            const auto store = [&]<ActivationForm kForm, bool kHasResidual>() {
                const int64_t first = token * o.n + output;
                const T* const residual = static_cast<const T*>(o.residual) + first;
#pragma unroll
                for (int j = 0; j < kTokens / 8; j += kStored) {
                    float x[kStored][4];
#pragma unroll
                    for (int i = 0; i < kStored; ++i) {
                        scaled(j + i, x[i]);
#pragma unroll
                        for (float& own : x[i]) own = activate<kForm>(own, p.activation);
                    }
                    store_turned<T, kHasResidual>(x, lane, residual + 8 * j * o.n,
                                                  d + first + 8 * j * o.n, o.n,
                                                  o.m - token - 8 * j);
                }
            };
            // Two warps have gates and their values: each multiplies half of the tokens.
            const auto store_gated = [&]<ActivationForm kForm, bool kHasGates>() {
                constexpr int kSteps = C::kGivenSums / 4, kHalf = kTokens / 16;
                auto* const given = reinterpret_cast<float4*>(stages + kStages * C::kStageBytes);
                float4* const own = given + (warp * kSteps * 32 + lane);
                const float4* const other = given + ((warp ^ 2) * kSteps * 32 + lane);
                const int64_t columns = o.n / 2;
                T* const first =
                    d + token * columns + block_n * (kBlockOutputs / 2) + strip % 2 * kStripOutputs;
#pragma unroll
                for (int round = 0; round < kHalf; round += kSteps) {
                    constexpr int kKept = kHasGates ? 0 : kHalf;
#pragma unroll
                    for (int i = 0; i < kSteps; ++i) {
                        float x[4];
                        scaled(round + kHalf - kKept + i, x);
                        own[i * 32] = {x[0], x[1], x[2], x[3]};
                    }
                    sync_threads_of(64, warpgroup * 2 + strip % 2);
#pragma unroll
                    for (int j = 0; j < kSteps; j += kStored) {
                        float x[kStored][4];
#pragma unroll
                        for (int i = 0; i < kStored; ++i) {
                            scaled(round + kKept + j + i, x[i]);
                            const float4 its = other[(j + i) * 32];
                            const float y[4] = {its.x, its.y, its.z, its.w};
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                const float gate = kHasGates ? x[i][e] : y[e];
                                x[i][e] = activate<kForm>(gate, p.activation) *
                                          (kHasGates ? y[e] : x[i][e]);
                            }
                        }
                        const int at = 8 * (round + kKept + j);
                        store_turned<T, false>(x, lane, static_cast<const T*>(nullptr),
                                               first + at * columns, columns, o.m - token - at);
                    }
                    sync_threads_of(64, warpgroup * 2 + strip % 2);
                }
            };
            constexpr auto kLinear = ActivationForm::linear, kErf = ActivationForm::erf;
            constexpr auto kSigmoid = ActivationForm::sigmoid;
            const bool has_gates = strip < 2, has_residual = o.residual != nullptr;
            if (o.gated && p.form == kErf) {
                has_gates ? store_gated.template operator()<kErf, true>()
                          : store_gated.template operator()<kErf, false>();
            } else if (o.gated) {
                has_gates ? store_gated.template operator()<kSigmoid, true>()
                          : store_gated.template operator()<kSigmoid, false>();
            } else if (p.form == kErf) {
                has_residual ? store.template operator()<kErf, true>()
                             : store.template operator()<kErf, false>();
            } else if (p.form == kSigmoid) {
                has_residual ? store.template operator()<kSigmoid, true>()
                             : store.template operator()<kSigmoid, false>();
            } else {
                has_residual ? store.template operator()<kLinear, true>()
                             : store.template operator()<kLinear, false>();
            }
        }
    }
    __syncwarp();
    arrive_in_cluster();  // no CTA leaves while the other may still signal it
    wait_for_cluster();
}

// Pairs of CTAs that run at once.
template <auto kKernel>
int pairs_at_once(int threads, int smem_bytes) {
    static const int count = [&] {
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(num_sms() / 2 * 2));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {2, 1, 1};
        config.attrs = &cluster;
        config.numAttrs = 1;
        int found = 0;
        BYTETX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kKernel, &config));
        return std::max(found, 1);
    }();
    return count;
}

template <typename C>
void launch_token_tiles(const GroupedLinearParams& o, PairRange outputs, cudaStream_t stream) {
    constexpr auto kKernel = grouped_tiles_kernel<C>;
    GroupedTiles p{};
    p.o = o;
    p.activation = activation_constants(o.activation);
    p.form = form_of(o.activation);
    p.tiles_m = num_tiles(o.m, C::kTileTokens);
    p.first_pair = outputs.begin;
    p.pairs_n = outputs.end - outputs.begin;
    p.num_k_blocks = num_tiles(o.k, kBlockFeatures);
    allow_smem_once<kKernel>(C::kSmemBytes);
    const int pairs =
        std::min(pairs_at_once<kKernel>(C::kThreads, C::kSmemBytes), p.tiles_m * p.pairs_n);
    const Matrix x{"grouped_linear", map_type(o.dtype), o.x, o.m, o.k};
    const LaunchShape shape{dim3(static_cast<unsigned>(pairs * C::kPair)), dim3(C::kThreads),
                            C::kSmemBytes, stream, C::kPair};
    launch_kernel(kKernel, shape, make_map(x, C::kTileTokens / C::kPair), p);
}

template <typename T, CodeKind kKind>
void launch_grouped_tiles(const GroupedLinearParams& o, int tokens, PairRange outputs,
                          cudaStream_t stream) {
    if (tokens == 128) {
        return launch_token_tiles<TokenTile<T, kKind, 128>>(o, outputs, stream);
    }
    launch_token_tiles<TokenTile<T, kKind, 256>>(o, outputs, stream);
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_grouped_tiles<Half, kFourBits>(const GroupedLinearParams& o, int tokens,
                                                           PairRange outputs, cudaStream_t stream);

extern template void launch_grouped_tiles<BFloat16, kFourBits>(const GroupedLinearParams& o,
                                                               int tokens, PairRange outputs,
                                                               cudaStream_t stream);

extern template void launch_grouped_tiles<Half, kFourBitsZero>(const GroupedLinearParams& o,
                                                               int tokens, PairRange outputs,
                                                               cudaStream_t stream);

extern template void launch_grouped_tiles<BFloat16, kFourBitsZero>(const GroupedLinearParams& o,
                                                                   int tokens, PairRange outputs,
                                                                   cudaStream_t stream);

extern template void launch_grouped_tiles<Half, kEightBits>(const GroupedLinearParams& o,
                                                            int tokens, PairRange outputs,
                                                            cudaStream_t stream);

extern template void launch_grouped_tiles<BFloat16, kEightBits>(const GroupedLinearParams& o,
                                                                int tokens, PairRange outputs,
                                                                cudaStream_t stream);

extern template void launch_grouped_tiles<Half, kEightBitsPair>(const GroupedLinearParams& o,
                                                                int tokens, PairRange outputs,
                                                                cudaStream_t stream);

extern template void launch_grouped_tiles<BFloat16, kEightBitsPair>(const GroupedLinearParams& o,
                                                                    int tokens, PairRange outputs,
                                                                    cudaStream_t stream);

}  // namespace bytetx::grouped
