// The residual of a product whose rows have adapters, in steps of few rows:
//
//   out[i] = residual[i] + x[i] a_o^T b_o^T + bias_o      for the owner o of row i
//
// x [m, k], out [m, n], f16 or bf16, sums in f32; a_o [rank, k], b_o [n, rank], rank <= 256.
// A CTA makes a block of columns of a tile, at most 16 rows of one owner, from those ranks that
// change it, 16 at a time: each of its eight warps multiplies every eighth run of 32 columns of x
// and a, the partial sums meet in shared memory and are rounded once. Then each warp expands its
// columns. What depends on the owner alone is read before the kernel ahead has ended: its
// descriptions and the first rows of a; the rest of a, and b, come to L2.
//
// Both products use mma.sync with their inner dimension permuted, so that a lane's share of a row
// is 16 (of b 8) consecutive bytes: lane q of four has k = 8 q .. 8 q + 7 of a run of 32, two
// products of 16. The columns of an expansion are permuted likewise, and a lane stores 16 bytes at
// a time.
//
// Bytes: rank (k + n) * 2 of each owner, m (k + 2 n) * 2; for few rows bound by latency: three
// reads one after another before the kernel ahead ends, two after it. Source: LoRA (arXiv
// 2106.09685), section 4.1; rows of many adapters in one step: S-LoRA (arXiv 2311.03285),
// section 5.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "cuda/mma.cuh"
#include "low_rank_ops.h"

namespace bytetx {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRows = 16;  // a tile's
constexpr int kRun = 32;   // columns of x that a warp multiplies at once
constexpr int kStep = 16;  // ranks that are multiplied at once
constexpr int kMaxRank = 256;
constexpr int kLine = 128;       // bytes
constexpr int kRangeSize = 128;  // outputs of an entry of ranges
constexpr int kWide = 2048;      // outputs from which on blocks are wide
constexpr int kMaxTiles = 64;    // CTAs along the tiles

struct Tile {
    int first, num_rows, owner, rank;
    const void* a;
    const void* b;
    const void* bias;
};

// Without an owner: no rank and no bias.
__device__ __forceinline__ Tile read_tile(const LowRankParams& p, int number) {
    const int32_t* at = p.tiles + 3 * number;
    Tile tile{at[0], at[1], at[2], 0, nullptr, nullptr, nullptr};
    if (tile.num_rows > 0 && tile.owner >= 0) {
        const int64_t* of = p.addresses + 4 * int64_t{tile.owner};
        tile.a = reinterpret_cast<const void*>(of[0]);
        tile.b = reinterpret_cast<const void*>(of[1]);
        tile.rank = static_cast<int>(of[2]);
        tile.bias = reinterpret_cast<const void*>(of[3]);
    }
    return tile;
}

struct Steps {
    int first, end;
};

// The steps of 16 ranks that change some outputs of first_column .. end_column - 1.
__device__ __forceinline__ Steps used_steps(const LowRankParams& p, const Tile& tile,
                                            int first_column, int end_column) {
    Steps steps{tile.rank, 0};
    if (tile.rank > 0) {
        const int num_ranges = static_cast<int>((p.n + kRangeSize - 1) / kRangeSize);
        const int32_t* ranges = p.ranges + 2 * int64_t{tile.owner} * num_ranges;
        for (int i = first_column / kRangeSize; i * kRangeSize < end_column; ++i) {
            if (ranges[2 * i] >= ranges[2 * i + 1]) continue;
            steps.first = min(steps.first, ranges[2 * i]);
            steps.end = max(steps.end, ranges[2 * i + 1]);
        }
    }
    return {steps.first / kStep, (min(steps.end, tile.rank) + kStep - 1) / kStep};
}

// Asks for the memory from first to end to come to L2.
template <typename T>
__device__ __forceinline__ void prefetch(const T* first, const T* end) {
    const auto* bytes = reinterpret_cast<const char*>(first);
    const auto num_bytes = static_cast<int>(reinterpret_cast<const char*>(end) - bytes);
    for (int at = static_cast<int>(threadIdx.x) * kLine; at < num_bytes; at += kThreads * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(bytes + at));
    }
}

// Eight neighbours of a row, 0 where there are none.
template <typename T>
__device__ __forceinline__ uint4 load_run(const T* row, bool has_row, int column, int k) {
    if (!has_row || column >= k) return uint4{0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(row + column);
}

// b[column, r .. r + 3]: two operands of products over ranks.
template <typename T>
__device__ __forceinline__ uint2 load_ranks(const T* b, int column, int r, int rank) {
    const T* at = b + (column * rank + r);
    if (rank % 4 == 0) return r < rank ? *reinterpret_cast<const uint2*>(at) : uint2{0, 0};
    alignas(8) T four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) four[j] = r + j < rank ? at[j] : static_cast<T>(0.0f);
    return *reinterpret_cast<const uint2*>(four);
}

// kTiles: eight columns of each warp each.
template <typename T, int kTiles>
__global__ void __launch_bounds__(kThreads, 2) low_rank_kernel(const LowRankParams p) {
    constexpr int kColumns = 8 * kTiles * kWarps;
    constexpr int kAhead = 4;  // runs that are in flight at once
    __shared__ float partial[kWarps][kRows][kStep + 4];
    __shared__ __align__(16) T sums[kRows][kMaxRank + 8];
    release_next_kernel();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int group = lane / 4, quad = lane % 4;
    const int n = static_cast<int>(p.n), k = static_cast<int>(p.k);
    const int first_column = static_cast<int>(blockIdx.x) * kColumns;
    const int end_column = min(first_column + kColumns, n);
    // A lane stores columns own .. own + 2 kTiles - 1; it multiplies with b's rows from `used` on.
    const int own = first_column + warp * 8 * kTiles + quad * 2 * kTiles;
    const int used = first_column + warp * 8 * kTiles + group / 2 * 2 * kTiles + group % 2;
    const T* x = static_cast<const T*>(p.x);
    bool has_waited = false;
    for (int number = static_cast<int>(blockIdx.y); number < p.num_tiles; number += gridDim.y) {
        const Tile tile = read_tile(p, number);
        if (tile.num_rows <= 0) break;
        const T* a = static_cast<const T*>(tile.a);
        const T* b = static_cast<const T*>(tile.b);
        int row[2];
        bool has_row[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = group + 8 * half;
            has_row[half] = local < tile.num_rows;
            row[half] = has_row[half] ? p.rows[tile.first + local] : 0;
        }
        const Steps steps = used_steps(p, tile, first_column, end_column);
        uint4 from_a[kAhead][2];
        const auto load_a = [&](int step, int first_run) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int column = (first_run + i * kWarps) * kRun + 8 * quad;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int r = step * kStep + 8 * j + group;
                    from_a[i][j] = load_run(a + r * k, r < tile.rank, column, k);
                }
            }
        };
        uint2 from_b[kTiles];
        const auto load_b = [&](int step) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                const int column = used + 2 * j;
                from_b[j] = column < n ? load_ranks(b, column, step * kStep + 4 * quad, tile.rank)
                                       : uint2{0, 0};
            }
        };
        if (steps.first < steps.end) {
            load_a(steps.first, warp);
            prefetch(b + first_column * tile.rank, b + end_column * tile.rank);
            const int later = (steps.first + 1) * kStep;
            prefetch(a + later * k, a + min(steps.end * kStep, tile.rank) * k);
        }
        if (!has_waited) wait_for_prior_kernel();
        has_waited = true;
#pragma unroll 1
        for (int step = steps.first; step < steps.end; ++step) {
            float part[2][4] = {};
            const int num_runs = (k + kRun - 1) / kRun;
            for (int run = warp; run < num_runs; run += kWarps * kAhead) {
                uint4 from_x[kAhead][2];
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    const int column = (run + i * kWarps) * kRun + 8 * quad;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        from_x[i][half] = load_run(x + row[half] * k, has_row[half], column, k);
                    }
                }
                if (run != warp) load_a(step, run);
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    const uint4 &upper = from_x[i][0], &lower = from_x[i][1];
                    const uint32_t left[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                                                 {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        mma<T>(part[j], left[0], from_a[i][j].x, from_a[i][j].y);
                        mma<T>(part[j], left[1], from_a[i][j].z, from_a[i][j].w);
                    }
                }
            }
            // The next factors are on their way while the warps' sums meet.
            if (step + 1 < steps.end) {
                load_a(step + 1, warp);
            } else {
                load_b(steps.first);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float* at = &partial[warp][group + 8 * half][8 * j + 2 * quad];
                    *reinterpret_cast<float2*>(at) =
                        make_float2(part[j][2 * half], part[j][2 * half + 1]);
                }
            }
            __syncthreads();
            static_assert(kRows * kStep == kThreads);
            const int of_row = static_cast<int>(threadIdx.x) / kStep;
            const int of_rank = static_cast<int>(threadIdx.x) % kStep;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += partial[w][of_row][of_rank];
            sums[of_row][step * kStep + of_rank] = static_cast<T>(sum);
            __syncthreads();
        }
        float acc[kTiles][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < kTiles; j += 4) {
                const int column = own + 2 * j;
                const bool is_there = column < n;
                uint4 before{0, 0, 0, 0}, bias{0, 0, 0, 0};
                if (p.residual != nullptr && has_row[half] && is_there) {
                    const T* at = static_cast<const T*>(p.residual) +
                                  (row[half] * static_cast<int>(p.residual_stride) + column);
                    before = *reinterpret_cast<const uint4*>(at);
                }
                if (tile.bias != nullptr && is_there) {
                    const T* at = static_cast<const T*>(tile.bias) + column;
                    bias = *reinterpret_cast<const uint4*>(at);
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    acc[j + i / 2][2 * half + i % 2] = element<T>(before, i) + element<T>(bias, i);
                }
            }
        }
#pragma unroll 1
        for (int step = steps.first; step < steps.end; ++step) {
            if (step > steps.first) load_b(step);
            const int r = step * kStep + 4 * quad;
            const auto upper = *reinterpret_cast<const uint2*>(&sums[group][r]);
            const auto lower = *reinterpret_cast<const uint2*>(&sums[group + 8][r]);
            const uint32_t left[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
            for (int j = 0; j < kTiles; ++j) mma<T>(acc[j], left, from_b[j].x, from_b[j].y);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < kTiles; j += 4) {
                const int column = own + 2 * j;
                if (!has_row[half] || column >= n) continue;
                float values[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] = acc[j + i / 2][2 * half + i % 2];
                T* at = static_cast<T*>(p.out) + (row[half] * n + column);
                *reinterpret_cast<uint4*>(at) = pack<T>(values);
            }
        }
    }
}

template <typename T, int kTiles>
void launch_tiles(const LowRankParams& p, cudaStream_t stream) {
    constexpr int kColumns = 8 * kTiles * kWarps;
    const auto blocks = static_cast<unsigned>((p.n + kColumns - 1) / kColumns);
    const auto tiles = static_cast<unsigned>(std::min<int64_t>(p.num_tiles, kMaxTiles));
    launch_kernel(low_rank_kernel<T, kTiles>, {dim3(blocks, tiles), dim3(kThreads), 0, stream}, p);
}

// Wide blocks read x and a less often, narrow ones are more CTAs.
template <typename T>
void launch_width(const LowRankParams& p, cudaStream_t stream) {
    if (p.n > kWide) return launch_tiles<T, 8>(p, stream);
    launch_tiles<T, 4>(p, stream);
}

}  // namespace

void low_rank(const LowRankParams& p, const Launch& launch) {
    if (p.n <= 0 || p.k <= 0 || p.n % 8 != 0 || p.k % 8 != 0 || p.max_rank > kMaxRank ||
        p.dtype == DType::f32) {
        throw std::invalid_argument(
            "low_rank takes f16 or bf16, n % 8 == 0, k % 8 == 0 and ranks up to 256, got n = " +
            std::to_string(p.n) + ", k = " + std::to_string(p.k) +
            ", max_rank = " + std::to_string(p.max_rank));
    }
    if (p.num_tiles <= 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (p.dtype == DType::f16) {
        launch_width<__half>(p, stream);
    } else {
        launch_width<__nv_bfloat16>(p, stream);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
