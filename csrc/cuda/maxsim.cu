// ColBERT's scores of one query's vectors and packed documents (late interaction):
//
//   scores[i] = sum_q max_d query[q] . documents[d] / divisor,   d over document i's vectors
//
// query [num_vectors, size], documents [total, size], f16 or bf16; products and sums are f32. One
// CTA a document: its four warps take 16 of the document's vectors at a time, which are the rows of
// mma.sync's first operand, and the query's vectors are the columns of its second. The query lies
// in shared memory as the lanes need it. A sum over features has no order that matters, so a lane
// takes eight features that lie next to one another, in one access, for two steps of 16.
//
// Bounds of up to kDocuments documents travel with the launch, as its parameter: no copy to the
// device is waited for, nor launched. Bytes: every vector of the documents once; bound by HBM, for
// 1000 documents rather by the launch. Source: ColBERT (arXiv 2004.12832), section 3.2.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "cuda/mma.cuh"
#include "maxsim_ops.h"

namespace bytetx {
namespace {

constexpr int kWarps = 4;
constexpr int kRows = 16;               // document vectors of one product
constexpr int kColumns = 8;             // query vectors
constexpr int kPartFeatures = 32;       // that four lanes hold of a row, 16 bytes each
constexpr int kMostVectors = 64;        // vectors per query
constexpr int kDocuments = 1000;        // documents per launch: parameters have 4 KB
constexpr int64_t kMostRows = 1 << 30;  // rows per launch: offsets are int32

struct Documents {
    const uint4* rows;  // from the first document of the launch on
    float* scores;
    int32_t ends[kDocuments + 1];  // rows before each document
};

struct Query {
    const uint4* rows;
    int32_t num_vectors;
    float divisor;
    float empty_score;
};

__device__ __forceinline__ float nan_max(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// Row lane / 4 or that + 8 of a tile, its features 8 * (lane % 4) + {0 .. 7} of each part.
template <int kParts>
struct DocumentTile {
    uint4 upper[kParts], lower[kParts];

    // Rows past the end repeat the last one: no maximum changes.
    __device__ __forceinline__ void load(const uint4* rows, int first, int end, int lane) {
        constexpr int kRowVecs = kParts * 4;
        const uint4* a = rows + int64_t{min(first + lane / 4, end - 1)} * kRowVecs + lane % 4;
        const uint4* b = rows + int64_t{min(first + lane / 4 + 8, end - 1)} * kRowVecs + lane % 4;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            upper[part] = load_once(a + 4 * part);
            lower[part] = load_once(b + 4 * part);
        }
    }
};

// kParts: of 32 features.  kTiles: of eight query vectors.
template <typename T, int kParts, int kTiles>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    maxsim_kernel(const __grid_constant__ Documents documents, const Query query) {
    __shared__ uint4 queries[kTiles][kParts][kWarpSize];
    __shared__ float best[kWarps][kTiles * kColumns];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int begin = documents.ends[blockIdx.x], end = documents.ends[blockIdx.x + 1];
    release_next_kernel();
    wait_for_prior_kernel();
    if (begin == end) {
        if (threadIdx.x == 0) documents.scores[blockIdx.x] = query.empty_score;
        return;
    }
    DocumentTile<kParts> next;
    int first = begin + warp * kRows;
    if (first < end) next.load(documents.rows, first, end, lane);
    for (int i = warp; i < kTiles * kParts; i += kWarps) {
        const int tile = i / kParts, part = i % kParts;
        const int row = min(tile * kColumns + lane / 4, query.num_vectors - 1);
        queries[tile][part][lane] = query.rows[(row * kParts + part) * 4 + lane % 4];
    }
    __syncthreads();

    float top[kTiles][2];
#pragma unroll
    for (auto& pair : top) pair[0] = pair[1] = -INFINITY;
    while (first < end) {
        const DocumentTile<kParts> tile = next;
        first += kWarps * kRows;
        if (first < end) next.load(documents.rows, first, end, lane);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            float products[4] =
                {};  // rows lane / 4 twice, then + 8; columns 2 * (lane % 4) + {0, 1}
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const uint4 q = queries[j][part][lane];
                const uint4 &a = tile.upper[part], &b = tile.lower[part];
                mma<T>(products, {a.x, b.x, a.y, b.y}, q.x, q.y);
                mma<T>(products, {a.z, b.z, a.w, b.w}, q.z, q.w);
            }
            top[j][0] = nan_max(top[j][0], nan_max(products[0], products[2]));
            top[j][1] = nan_max(top[j][1], nan_max(products[1], products[3]));
        }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            float value = top[j][column];
#pragma unroll
            for (int offset = 4; offset < kWarpSize; offset *= 2) {
                value = nan_max(value, __shfl_xor_sync(kFullMask, value, offset));
            }
            if (lane < 4) best[warp][j * kColumns + 2 * lane + column] = value;
        }
    }
    __syncthreads();
    if (warp != 0) return;
    float sum = 0.0f;
    for (int vector = lane; vector < query.num_vectors; vector += kWarpSize) {
        float value = best[0][vector];
#pragma unroll
        for (int other = 1; other < kWarps; ++other) value = nan_max(value, best[other][vector]);
        sum += value;
    }
    sum = row_sum<kWarpSize>(sum);
    if (lane == 0) documents.scores[blockIdx.x] = sum / query.divisor;
}

template <typename T, int kParts, int kTiles>
void launch_all(const MaxsimOfOneParams& p, cudaStream_t stream) {
    const int64_t row_vecs = kParts * 4;
    const Query query{static_cast<const uint4*>(p.query), p.num_vectors, p.divisor, p.empty_score};
    for (int64_t first = 0; first < p.num_documents; first += kDocuments) {
        const int64_t count = std::min(int64_t{kDocuments}, p.num_documents - first);
        const int64_t begin = p.cu_documents[first];
        if (p.cu_documents[first + count] - begin > kMostRows) {
            throw std::invalid_argument("maxsim_of_one takes up to 2^30 vectors of 1000 documents");
        }
        Documents some{
            static_cast<const uint4*>(p.documents) + begin * row_vecs, p.scores + first, {}};
        for (int64_t i = 0; i <= count; ++i) {
            some.ends[i] = static_cast<int32_t>(p.cu_documents[first + i] - begin);
        }
        launch_kernel(maxsim_kernel<T, kParts, kTiles>,
                      {dim3(static_cast<unsigned>(count)), dim3(kWarps * kWarpSize), 0, stream},
                      some, query);
    }
}

}  // namespace

void maxsim_of_one(const MaxsimOfOneParams& p, const Launch& launch) {
    if (p.num_vectors < 1 || p.num_vectors > kMostVectors || p.size < kPartFeatures ||
        p.size > 4 * kPartFeatures || p.size % kPartFeatures != 0 || p.dtype == DType::f32) {
        throw std::invalid_argument(
            "maxsim_of_one takes 1 to 64 vectors of 32, 64, 96 or 128 f16 or bf16 numbers, got " +
            std::to_string(p.num_vectors) + " of " + std::to_string(p.size));
    }
    if (p.num_documents == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    const auto of_type = [&]<typename T>() {
        dispatch_at_least<1, 2, 3, 4>(p.size / kPartFeatures, [&]<int kParts>() {
            dispatch_at_least<1, 2, 4, 8>(
                (p.num_vectors + kColumns - 1) / kColumns,
                [&]<int kTiles>() { launch_all<T, kParts, kTiles>(p, stream); });
        });
    };
    if (p.dtype == DType::f16) {
        of_type.template operator()<__half>();
    } else {
        of_type.template operator()<__nv_bfloat16>();
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
