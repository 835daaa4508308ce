// The kernel of grouped_linear() and its launch; grouped_linear.cu says how it works.
#pragma once

#include <algorithm>
#include <atomic>

#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "cuda/grouped_codes.cuh"
#include "cuda/grouped_epilogue.cuh"
#include "cuda/mma.cuh"
#include "gemm/launch.cuh"
#include "grouped_ops.h"

namespace bytetx::grouped {

using namespace gemm;

constexpr int kGroupedWarpgroups = 2;  // that multiply, each 64 outputs
constexpr int kGroupedOutputs = kGroupedWarpgroups * kBlockOutputs;
constexpr int kGroupedThreads = kGroupedWarpgroups * 128;  // and two warps that copy
constexpr int kMaxSharers = 8;                             // CTAs that share k: a cluster

struct GroupedProblem {
    GroupedLinearParams o;
    ActivationConstants activation;
    ActivationForm form;
    int tiles_m, tiles_n;
    int num_k_blocks;
    int sharers;
    int stages;
    bool has_whole_blocks;  // k is a multiple of 64: one box of x a stage
};

// kTokens: of a tile.  kBlocks: of k in a stage; a copy takes 0.2 us of its warp, whatever its
// size.
template <typename T, CodeKind kCodeKind, int kTokens>
struct GroupedTile {
    using Element = T;
    static constexpr CodeKind kKind = kCodeKind;
    static constexpr int kTileTokens = kTokens;
    // Few columns by mma.sync: without wgmma's fences, blocks are decoded between products.
    static constexpr bool kIsWarp = kTokens <= 16;
    static constexpr int kBlocks = kTokens <= 32 ? 4 : 2;
    static constexpr int kBlockBytes = Codes<kKind>::kBytes;
    static constexpr int kRowsBytes = kTokens * kBlockFeatures * 2;  // a block's
    static constexpr int kCodesAt = kBlocks * kRowsBytes;
    static constexpr int kStageBytes =
        (kCodesAt + kGroupedWarpgroups * kBlocks * kBlockBytes + 1023) / 1024 * 1024;
    // Two CTAs an SM, but for the largest tiles, whose sums take too many registers.
    static constexpr int kCtas = kTokens <= 64 ? 2 : 1;
    static constexpr int kMaxStages = (kCtas == 2 ? 108 * 1024 : 216 * 1024) / kStageBytes;
    // So many that no second CTA finds a place.
    static constexpr int kAloneStages = kCtas == 2 ? 116 * 1024 / kStageBytes + 1 : kMaxStages;
    static constexpr int kMostStages = std::max(kMaxStages, kAloneStages);
    static constexpr int kPitch = kGroupedOutputs + 4;  // floats of a token's sums: no conflicts
    static constexpr int kSumsBytes = kTokens * kPitch * 4;
    // Shared memory: room to align it, 1 KiB of barriers, the ring, which sums take later.
    static constexpr int kBarrierBytes = 1024;
    static constexpr int smem_bytes(int stages) {
        return 1024 + kBarrierBytes + std::max(stages * kStageBytes, kSumsBytes);
    }
};

// The sum, in the order of k, of what the CTAs of a cluster have at this place of their memory.
__device__ __forceinline__ void sum_shared(const float* smem, int sharers, float (&sum)[4]) {
    float4 parts[kMaxSharers];
    const uint32_t at = smem_address(smem);
#pragma unroll
    for (int r = 0; r < kMaxSharers; ++r) {
        if (r >= sharers) continue;
        asm volatile(
            "{\n"
            ".reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %4, %5;\n"
            "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
            "}"
            : "=f"(parts[r].x), "=f"(parts[r].y), "=f"(parts[r].z), "=f"(parts[r].w)
            : "r"(at), "r"(r));
    }
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
    for (int r = 0; r < kMaxSharers; ++r) {
        if (r >= sharers) continue;
        sum[0] += parts[r].x, sum[1] += parts[r].y, sum[2] += parts[r].z, sum[3] += parts[r].w;
    }
}

// The products of a warp's 16 outputs and a block of rows in shared memory, swizzled as TMA does.
// Sums of two halves of the features do not wait for each other.
template <typename C>
__device__ __forceinline__ void multiply_rows(float (&sums)[C::kTileTokens / 8][2][4],
                                              const uint32_t (&a)[16], const uint8_t* rows,
                                              int lane) {
    using T = typename C::Element;
    // Eight tokens and 32 features a load: a lane gives a token's row of 16 bytes.
    const uint32_t row = smem_address(rows) + static_cast<uint32_t>(lane % 8 * 128);
#pragma unroll
    for (int t = 0; t < C::kTileTokens / 8; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int chunk = (4 * half + lane / 8) ^ lane % 8;
            uint32_t x[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(row + static_cast<uint32_t>(t * 1024 + chunk * 16)));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = 4 * (2 * half + j);
                const uint32_t of_a[4] = {a[at], a[at + 1], a[at + 2], a[at + 3]};
                mma<T>(sums[t][j], of_a, x[2 * j], x[2 * j + 1]);
            }
        }
    }
}

// Factors and biases, for the sums of one token and four outputs from `output` on.
template <typename T>
__device__ __forceinline__ void scale_sums(const GroupedLinearParams& o, int64_t output,
                                           float (&x)[4]) {
    const T* bias = static_cast<const T*>(o.bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (output + i >= o.n) continue;
        x[i] *= o.factor[output + i];
        if (bias != nullptr) x[i] += static_cast<float>(bias[output + i]);
    }
}

template <typename T>
__device__ __forceinline__ void store_sums(const GroupedLinearParams& o, int64_t columns,
                                           int64_t token, int64_t column, float (&x)[4]) {
    T* d = static_cast<T*>(o.d) + token * columns + column;
    const T* residual = static_cast<const T*>(o.residual);
    if (residual != nullptr) residual += token * columns + column;
    if (columns % 4 == 0) {  // a multiple of 8 bytes
        if (column >= columns) return;
        if (residual != nullptr) {
            const uint2 words = *reinterpret_cast<const uint2*>(residual);
            const float2 low = unpack(words.x, T{}), high = unpack(words.y, T{});
            x[0] += low.x, x[1] += low.y, x[2] += high.x, x[3] += high.y;
        }
        *reinterpret_cast<uint2*>(d) = {pack(x[0], x[1], T{}), pack(x[2], x[3], T{})};
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (column + i >= columns) continue;
        d[i] =
            static_cast<T>(x[i] + (residual != nullptr ? static_cast<float>(residual[i]) : 0.0f));
    }
}

template <typename C>
__global__ void __launch_bounds__(kGroupedThreads + 64, C::kCtas)
    grouped_linear_kernel(const __grid_constant__ CUtensorMap rows,
                          const __grid_constant__ GroupedProblem p) {
    using T = typename C::Element;
    constexpr int kTokens = C::kTileTokens, kBlocks = C::kBlocks;
    extern __shared__ uint8_t unaligned[];
    uint8_t* const aligned = unaligned + (1024 - smem_address(unaligned) % 1024) % 1024;
    auto* const full = reinterpret_cast<uint64_t*>(aligned);
    uint64_t* const empty = full + C::kMostStages;
    uint8_t* const smem = aligned + C::kBarrierBytes;

    const int rank = p.sharers > 1 ? cluster_rank() : 0;
    const int tile = static_cast<int>(blockIdx.x) / p.sharers;
    // Neighbours are tokens of eight tiles, so that both operands of a wave stay in L2.
    constexpr int kNeighbours = 8;
    const int of_group = kNeighbours * p.tiles_n;
    const int first_m = tile / of_group * kNeighbours;
    const int height = min(kNeighbours, p.tiles_m - first_m);
    const int m_tile = first_m + tile % of_group % height;
    const int n_tile = tile % of_group / height;
    const int first_block = p.num_k_blocks * rank / p.sharers;
    const int num_blocks = p.num_k_blocks * (rank + 1) / p.sharers - first_block;

    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            Barrier::init(full + i, 2);
            Barrier::init(empty + i, kGroupedWarpgroups);
        }
        fence_barrier_init();
    }
    __syncthreads();
    release_next_kernel();

    const int num_stages = (num_blocks + kBlocks - 1) / kBlocks;
    const auto blocks_of = [&](int i) { return min(kBlocks, num_blocks - i * kBlocks); };
    if (warp == kGroupedThreads / 32) {
        if (lane == 0) {
            const int blocks_n = static_cast<int>((p.o.n + kBlockOutputs - 1) / kBlockOutputs);
            AnyRingIndex at{p.stages};
            for (int i = 0; i < num_stages; ++i) {
                if (i >= p.stages) Barrier::wait(empty + at.index, at.phase ^ 1);
                const int bytes = blocks_of(i) * C::kBlockBytes;
                Barrier::arrive_and_expect(full + at.index, kGroupedWarpgroups * bytes);
#pragma unroll
                for (int w = 0; w < kGroupedWarpgroups; ++w) {
                    // Beyond n it is the last block again, whose sums are not stored.
                    const int block_n = min(n_tile * kGroupedWarpgroups + w, blocks_n - 1);
                    const int64_t block =
                        int64_t{block_n} * p.num_k_blocks + first_block + i * kBlocks;
                    load_bytes(p.o.codes + block * C::kBlockBytes, full + at.index,
                               smem + at.index * C::kStageBytes + C::kCodesAt +
                                   w * kBlocks * C::kBlockBytes,
                               bytes);
                }
                at.advance();
            }
            wait_for_prior_kernel();
        }
        __syncwarp();
    } else if (warp == kGroupedThreads / 32 + 1) {
        if (lane == 0) {
            prefetch_map(&rows);
            wait_for_prior_kernel();
            AnyRingIndex at{p.stages};
            for (int i = 0; i < num_stages; ++i) {
                if (i >= p.stages) Barrier::wait(empty + at.index, at.phase ^ 1);
                uint8_t* to = smem + at.index * C::kStageBytes;
                const int block = first_block + i * kBlocks, token = m_tile * kTokens;
                if (p.has_whole_blocks) {  // those beyond k are zeros
                    Barrier::arrive_and_expect(full + at.index, C::kCodesAt);
                    load_box(&rows, full + at.index, L2Policy::evict_last, to, 0, token, block);
                } else {
                    Barrier::arrive_and_expect(full + at.index, blocks_of(i) * C::kRowsBytes);
                    for (int b = 0; b < blocks_of(i); ++b) {
                        load_box(&rows, full + at.index, L2Policy::evict_last,
                                 to + b * C::kRowsBytes, (block + b) * kBlockFeatures, token);
                    }
                }
                at.advance();
            }
        }
        __syncwarp();
    } else {
        wait_for_prior_kernel();
        const int warpgroup = warp / 4, strip = warp % 4;
        Sums<kTokens / 2> sums;
        AnyRingIndex at{p.stages};
        const auto codes_of = [&](const uint8_t* stage, int b) {
            return stage + C::kCodesAt + (warpgroup * kBlocks + b) * C::kBlockBytes;
        };
        const auto enter = [&] {
            Barrier::wait(full + at.index, at.phase);
            asm volatile("" ::: "memory");  // the stage is read after this
            return smem + at.index * C::kStageBytes;
        };
        if constexpr (C::kIsWarp) {
            float parts[kTokens / 8][2][4] = {};
            const auto multiply = [&](const uint8_t* stage, int b) {
                uint32_t weights[16];
                weights_of_block<T, C::kKind>(codes_of(stage, b), strip, lane, p.o.form, weights);
                multiply_rows<C>(parts, weights, stage + b * C::kRowsBytes, lane);
            };
            for (int i = 0; i < num_stages; ++i) {
                const uint8_t* stage = enter();
                if (blocks_of(i) == kBlocks) {
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b) multiply(stage, b);
                } else {
                    for (int b = 0; b < blocks_of(i); ++b) multiply(stage, b);
                }
                sync_threads_of(128, 1 + warpgroup);
                if (threadIdx.x % 128 == 0) Barrier::arrive(empty + at.index);
                at.advance();
            }
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) {
                sums(i) = parts[i / 4][0][i % 4] + parts[i / 4][1][i % 4];
            }
        } else {
            sums.clear();
            uint32_t weights[2][16];
            const uint8_t* stage = smem;
            int last_stage = 0;
            // The products of a block run while the next one is decoded.
            const auto multiply = [&](uint32_t(&a)[16], int i) {
                const int b = i % kBlocks;
                if (b == 0) stage = enter();
                weights_of_block<T, C::kKind>(codes_of(stage, b), strip, lane, p.o.form, a);
                const Operand x = operand_at<128>(stage + b * C::kRowsBytes, 64);
                begin_products();
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    multiply_add<T, kTokens, false>(sums.x, a + 4 * j, x + 2 * j, 1);
                }
                commit_products();
                wait_for_products<1>();
                if (b == 0) {  // the products of the stage before have ended
                    if (i > 0 && threadIdx.x % 128 == 0) Barrier::arrive(empty + last_stage);
                    last_stage = at.index;
                    at.advance();
                }
            };
            int i = 0;
            for (; i + 1 < num_blocks; i += 2) {
                multiply(weights[0], i);
                multiply(weights[1], i + 1);
            }
            if (i < num_blocks) multiply(weights[0], i);
            wait_for_products<0>();
            sums.pin();
        }
        sync_threads_of(kGroupedThreads, 0);  // nobody reads the ring any more
        float* to = reinterpret_cast<float*>(smem) + warpgroup * kBlockOutputs +
                    strip * kStripOutputs + lane / 4;
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float* row = to + (8 * j + lane % 4 * 2 + e) * C::kPitch;
                row[0] = sums(4 * j + e);
                row[8] = sums(4 * j + 2 + e);
            }
        }
        if (p.sharers == 1) sync_threads_of(kGroupedThreads, 0);
    }
    if (p.sharers > 1) {
        arrive_in_cluster();
        wait_for_cluster();
    }
    if (warp < kGroupedThreads / 32) {
        const auto sums_of = [&](int token, int output, float(&x)[4]) {
            const float* at = reinterpret_cast<const float*>(smem) + token * C::kPitch + output;
            if (p.sharers > 1) return sum_shared(at, p.sharers, x);
            const float4 own = *reinterpret_cast<const float4*>(at);
            x[0] = own.x, x[1] = own.y, x[2] = own.z, x[3] = own.w;
        };
        const int64_t first_output = int64_t{n_tile} * kGroupedOutputs;
        const int64_t first_token = int64_t{m_tile} * kTokens;
        const int num_tokens = static_cast<int>(min(int64_t{kTokens}, p.o.m - first_token));
        const int own = rank * kGroupedThreads + static_cast<int>(threadIdx.x);
        const int step = p.sharers * kGroupedThreads;
        if (p.o.gated) {
            constexpr int kUnits = kGroupedOutputs / 8;
            for (int u = own; u < num_tokens * kUnits; u += step) {
                const int token = u / kUnits, column = u % kUnits * 4;
                const int output = column / 32 * 64 + column % 32;
                float gates[4], values[4];
                sums_of(token, output, gates);
                sums_of(token, output + 32, values);
                scale_sums<T>(p.o, first_output + output, gates);
                scale_sums<T>(p.o, first_output + output + 32, values);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    gates[i] = activate_as(p.form, gates[i], p.activation) * values[i];
                }
                store_sums<T>(p.o, p.o.n / 2, first_token + token, first_output / 2 + column,
                              gates);
            }
        } else {
            constexpr int kUnits = kGroupedOutputs / 4;
            for (int u = own; u < num_tokens * kUnits; u += step) {
                const int token = u / kUnits, output = u % kUnits * 4;
                float x[4];
                sums_of(token, output, x);
                scale_sums<T>(p.o, first_output + output, x);
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = activate_as(p.form, x[i], p.activation);
                store_sums<T>(p.o, p.o.n, first_token + token, first_output + output, x);
            }
        }
    }
    if (p.sharers > 1) {  // the others may still read this CTA's sums
        arrive_in_cluster();
        wait_for_cluster();
    }
}

// How a product is divided: CTAs that share k, and the stages of their rings.
struct GroupedSplit {
    int sharers, stages;
};

// Clusters of so many CTAs that find a place at once, an SM for each CTA or for two.
template <auto kKernel>
int places_of(int sharers, int smem_bytes, bool is_alone) {
    static std::atomic<int> known[2][kMaxSharers];
    std::atomic<int>& places = known[is_alone][sharers - 1];
    if (places.load(std::memory_order_relaxed) == 0) {
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(sharers));
        config.blockDim = dim3(kGroupedThreads + 64);
        config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(sharers), 1, 1};
        config.attrs = &attribute;
        config.numAttrs = 1;
        int found = 0;
        BYTETX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kKernel, &config));
        places.store(std::max(found, 1), std::memory_order_relaxed);
    }
    return places.load(std::memory_order_relaxed);
}

// The split that takes least time, in blocks of k: more of it where two CTAs share an SM, and some
// for each CTA and each sum that is fetched. All CTAs that share k must run at once.
template <typename C, auto kKernel>
GroupedSplit choose_split(int tiles, int num_k_blocks) {
    const auto stages_of = [&](int sharers) {
        return std::min(num_tiles(num_tiles(num_k_blocks, sharers), C::kBlocks), C::kMaxStages);
    };
    GroupedSplit best{1, stages_of(1)};
    double least = 1e30;
    for (int s = 1; s <= kMaxSharers && s <= num_k_blocks; ++s) {
        const int stages = stages_of(s), blocks = num_tiles(num_k_blocks, s);
        for (const bool is_alone : {true, false}) {
            if (!is_alone && C::kCtas == 1) continue;
            const int bytes = C::smem_bytes(is_alone ? C::kAloneStages : C::kMaxStages);
            const int waves = num_tiles(tiles, places_of<kKernel>(s, bytes, is_alone));
            if (waves > 1 && s > 1) continue;
            const double time = waves * (blocks * (is_alone ? 1.0 : 1.6) + 8) + (s > 1 ? 6 + s : 0);
            if (time >= least) continue;
            least = time;
            best = {s, is_alone ? std::max(stages, C::kAloneStages) : stages};
        }
    }
    return best;
}

// Boxes of a stage, [kBlocks][kTokens][64 features], where k is whole blocks; else of one block.
template <typename C>
CUtensorMap grouped_map(const GroupedLinearParams& o, bool has_whole_blocks) {
    const Matrix x{"grouped_linear", map_type(o.dtype), o.x, o.m, o.k};
    if (!has_whole_blocks) return make_map(x, C::kTileTokens);
    const cuuint64_t sizes[3] = {kBlockFeatures, cuuint64_t(o.m), cuuint64_t(o.k / kBlockFeatures)};
    const cuuint64_t strides[2] = {cuuint64_t(o.k) * 2, kBlockFeatures * 2};
    const cuuint32_t box[3] = {kBlockFeatures, C::kTileTokens, C::kBlocks};
    return encode_map(x, 3, sizes, strides, box);
}

template <typename C>
void launch_grouped_tile(const GroupedLinearParams& o, cudaStream_t stream) {
    constexpr int kTokens = C::kTileTokens;
    constexpr auto kKernel = grouped_linear_kernel<C>;
    GroupedProblem p{};
    p.o = o;
    p.activation = activation_constants(o.activation);
    p.form = form_of(o.activation);
    p.tiles_m = num_tiles(o.m, kTokens);
    p.tiles_n = num_tiles(o.n, kGroupedOutputs);
    p.num_k_blocks = num_tiles(o.k, kBlockFeatures);
    p.has_whole_blocks = o.k % kBlockFeatures == 0;
    const int tiles = p.tiles_m * p.tiles_n;
    allow_smem_once<kKernel>(C::smem_bytes(C::kMostStages));
    const auto [sharers, stages] = choose_split<C, kKernel>(tiles, p.num_k_blocks);
    p.sharers = sharers;
    p.stages = stages;
    const CUtensorMap rows = grouped_map<C>(o, p.has_whole_blocks);
    const LaunchShape shape{dim3(static_cast<unsigned>(tiles * p.sharers)),
                            dim3(kGroupedThreads + 64), C::smem_bytes(p.stages), stream, p.sharers};
    launch_kernel(kKernel, shape, rows, p);
}

template <typename T, CodeKind kKind>
void launch_grouped(const GroupedLinearParams& o, cudaStream_t stream) {
    const auto run = [&]<int kTokens>() {
        launch_grouped_tile<GroupedTile<T, kKind, kTokens>>(o, stream);
    };
    if (o.m <= 8) return run.template operator()<8>();
    if (o.m <= 16) return run.template operator()<16>();
    if (o.m <= 32) return run.template operator()<32>();
    if (o.m <= 64) return run.template operator()<64>();
    run.template operator()<128>();
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_grouped<Half, kFourBits>(const GroupedLinearParams& o,
                                                     cudaStream_t stream);

extern template void launch_grouped<BFloat16, kFourBits>(const GroupedLinearParams& o,
                                                         cudaStream_t stream);

extern template void launch_grouped<Half, kFourBitsZero>(const GroupedLinearParams& o,
                                                         cudaStream_t stream);

extern template void launch_grouped<BFloat16, kFourBitsZero>(const GroupedLinearParams& o,
                                                             cudaStream_t stream);

extern template void launch_grouped<Half, kEightBits>(const GroupedLinearParams& o,
                                                      cudaStream_t stream);

extern template void launch_grouped<BFloat16, kEightBits>(const GroupedLinearParams& o,
                                                          cudaStream_t stream);

extern template void launch_grouped<Half, kEightBitsPair>(const GroupedLinearParams& o,
                                                          cudaStream_t stream);

extern template void launch_grouped<BFloat16, kEightBitsPair>(const GroupedLinearParams& o,
                                                              cudaStream_t stream);

}  // namespace bytetx::grouped
