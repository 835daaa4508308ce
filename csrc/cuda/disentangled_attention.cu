// Disentangled attention (DeBERTa) over packed sequences on Hopper, by wgmma.
//
//   s(i, j) = q[i] . k[j] + q[i] . pos_k[b] + k[j] . pos_q[b],    b = buckets[i - j + span - 1]
//   out[i] = sum_j softmax_j(softmax_scale * s(i, j)) v[j]
//
// A CTA of one warpgroup has 64 rows of one head of one sequence and walks over its keys, 64 at a
// time. Their distances lie in two blocks of 64, of which the next keys meet the second again. A
// block's rows of pos_k and pos_q come to shared memory one for each distance, also where buckets
// are wide and rows repeat: the matrix unit then needs no bucket, and every product is a full one.
//
//   step n, keys 64 n and on     q.pos_k of block n + 1; that of block n is the step's before
//                                k.pos_q of blocks n and n + 1
//                                q.k
//                                terms to their scores, through shared memory (disentangled_terms)
//                                softmax, p.v
//
// Five products where plain attention has two. Queries, keys and values come by TMA, the rows of
// blocks by cp.async, a step ahead. Three CTAs of an SM (up to 64 features, else one) hide each
// other's waits.
//
// Numerics. Products, scores, softmax and sums are f32; weights are rounded to the element type for
// the second product. On their way to the scores, position terms are halves, for f16 and bf16
// inputs alike: rounded to 11 bits, where a bf16 input has 8. A term beyond their range (65504)
// makes its row no number, and such rows are computed again in f32 from the row's own keys
// (attention_store.cuh): right at every magnitude, and slow.
//
// Bytes: q, k, v, out once each from DRAM; keys, values and blocks (32 KB a step with 64 features)
// from L2. Bound by the terms' way through shared memory, 112 of 269 us in 256 texts around 128
// tokens (H200, 12 heads of 64): docs/kernels/attention.md.
//
// Sources: DeBERTa (arXiv 2006.03654), section 3.1; FlashAttention-2 (arXiv 2307.08691) for the
// online softmax; the blocks of distances are our own.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/row.cuh"
#include "cuda/attention_maps.cuh"
#include "cuda/attention_store.cuh"
#include "cuda/disentangled_terms.cuh"
#include "disentangled_ops.h"

namespace bytetx {
namespace attention {
namespace {

template <typename T, int kHeadDim>
struct DisentangledTypes : TileShapes<T, kHeadDim, kTileRows> {
    static constexpr int kThreads = 128;
    static constexpr int kSkippedKeys = 0;
    static constexpr int kMinCtas = kHeadDim <= 64 ? 3 : 1;  // by shared memory
};

// TMA maps first: they must be 64-byte aligned.
struct DisentangledParams {
    CUtensorMap q, k, v;
    DisentangledAttentionParams p;
    float power_scale;  // softmax_scale for powers of two
};

template <typename C>
struct DisentangledSmem {
    using T = typename C::Element;
    alignas(1024) T q[C::kQElements];
    alignas(1024) T k[C::kKvElements];
    alignas(1024) T v[C::kKvElements];
    alignas(1024) T pos_k[2][C::kKvElements];  // block n of distances at n % 2
    alignas(1024) T pos_q[2][C::kKvElements];
    Terms query_terms;  // q . pos_k of each score
    Terms key_terms;    // k . pos_q of each score
    uint64_t q_full, k_full, v_full;
};

struct SequenceTile {
    int begin;   // first token of the sequence
    int seqlen;  // 0: there is no such tile
    int row;     // first query, position in the sequence
};

// Sequence s has the tiles from cu_seqlens[s] / 64 + s on: enough of them, for rounding loses at
// most one, and found without a table, by the lanes of a warp together.
__device__ __forceinline__ SequenceTile find_tile(const DisentangledAttentionParams& p, int index) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int low = 0, high = static_cast<int>(p.batch_size);  // the last s whose first tile is <= index
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, at = low + lane * step;
        const bool is_before = at < high && p.cu_seqlens[at] / kTileRows + at <= index;
        const int count = __popc(__ballot_sync(kFullMask, is_before));  // lane 0 always is
        low += (count - 1) * step;
        high = min(high, low + step);
    }
    const int begin = uniform(p.cu_seqlens[low]);
    const int seqlen = uniform(p.cu_seqlens[low + 1]) - begin;
    const int row = (index - begin / kTileRows - uniform(low)) * kTileRows;
    return {begin, row < seqlen ? seqlen : 0, row};
}

// Where store_rows writes a tile's results, and what a row is computed again from. Rows count from
// the tile's first, keys from the sequence's.
template <typename C>
struct DisentangledTarget {
    using T = typename C::Element;
    static constexpr int kParts = 1;
    const DisentangledAttentionParams& p;
    SequenceTile tile;
    int head;

    __device__ __forceinline__ int head_dim() const { return p.head_dim; }
    __device__ __forceinline__ const T* row_of(const void* rows, int64_t stride,
                                               int position) const {
        return static_cast<const T*>(rows) + (int64_t{tile.begin} + position) * stride +
               head * p.head_dim;
    }
    __device__ __forceinline__ T* result(int row) const {
        return const_cast<T*>(row_of(p.out, p.out_stride, tile.row + row));
    }
    __device__ __forceinline__ int2 bounds(int, int) const { return {0, tile.seqlen}; }
    __device__ __forceinline__ const T* query(int row) const {
        return row_of(p.q, p.q_stride, tile.row + row);
    }
    __device__ __forceinline__ const T* key(int key) const { return row_of(p.k, p.k_stride, key); }
    __device__ __forceinline__ const T* value(int key) const {
        return row_of(p.v, p.v_stride, key);
    }
    __device__ __forceinline__ float term(const T* row, const void* table, int bucket) const {
        if (table == nullptr) return 0.0f;
        const T* position =
            static_cast<const T*>(table) + (int64_t{bucket} * p.num_heads + head) * p.head_dim;
        float sum = 0.0f;
#pragma unroll 1
        for (int d = 0; d < p.head_dim; ++d) {
            sum += static_cast<float>(row[d]) * static_cast<float>(position[d]);
        }
        return sum;
    }
    __device__ __forceinline__ float score(float product, int row, int at) const {
        const int bucket = bucket_of(p, tile.row + row - at);
        product += term(query(row), p.pos_k, bucket);
        product += term(key(at), p.pos_q, bucket);
        return product * p.softmax_scale;
    }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas)
    disentangled_kernel(const __grid_constant__ DisentangledParams params) {
    using T = typename C::Element;
    constexpr int kN = kTileRows;
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& s = *known_uniform(reinterpret_cast<DisentangledSmem<C>*>(smem));
    const DisentangledAttentionParams& p = params.p;
    release_next_kernel();
    const bool is_fetcher = threadIdx.x == 0;
    if (is_fetcher) {
        FullBarrier::init(&s.q_full, 1);
        FullBarrier::init(&s.k_full, 1);
        FullBarrier::init(&s.v_full, 1);
        fence_barrier_init();
    }
    __syncwarp();  // the whole warp may initialise, in the compiler's eyes; its first lane arrives
    wait_for_prior_kernel();
    // Heads of a tile run together: their rows adjoin.
    const int head = static_cast<int>(blockIdx.x) % p.num_heads;
    const SequenceTile tile = find_tile(p, static_cast<int>(blockIdx.x) / p.num_heads);
    if (tile.seqlen == 0) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);

    const auto fetch = [&](const CUtensorMap& map, uint64_t* full, T* to, int position) {
        FullBarrier::arrive_and_expect(full, C::kKvElements * kElementBytes);
        load_tile<C, kN>(map, full, to, head, tile.begin + position);
    };
    BlockRows<C> block;
    const auto find_block = [&](int n) { block.find(p, tile.row + 1 - kN * n); };
    const auto copy_block = [&](int n) {
        block.copy(p, head, p.pos_k, s.pos_k[n & 1]);
        block.copy(p, head, p.pos_q, s.pos_q[n & 1]);
    };
    if (is_fetcher) {
        fetch(params.q, &s.q_full, s.q, tile.row);
        fetch(params.k, &s.k_full, s.k, 0);
        fetch(params.v, &s.v_full, s.v, 0);
    }
    find_block(0);
    copy_block(0);
    find_block(1);
    copy_block(1);
    commit_copies();

    SoftmaxRows<C> rows;
    rows.tid = static_cast<int>(threadIdx.x);
    rows.lane = lane;
    rows.clear();
    // Rows past the end see what the last one sees and are not stored; warps without any see none.
    const bool is_used = 16 * warp < tile.seqlen - tile.row;
    const int2 seen = {is_used ? 0 : tile.seqlen, tile.seqlen};
    const int2 bounds[2] = {seen, seen};
    rows.see(bounds, 0);

    wait_for_copies<0>();
    fence_async_reads();
    __syncthreads();  // the barriers are initialised, and the first two blocks are there
    FullBarrier::wait(&s.q_full, 0);
    {
        auto products = rows.template multiply_qk<kN>(s.q, s.pos_k[0]);
        wait_for_products<0>();
        products.pin();
        put_query_terms<true>(products, s.query_terms, warp, lane);
    }

    int phase = 0;
    for (int key = 0, n = 0; key < tile.seqlen; key += kN, ++n, phase ^= 1) {
        const bool has_next = key + kN < tile.seqlen;
        if (n > 0) {
            wait_for_copies<0>();
            fence_async_reads();
            __syncthreads();  // block n + 1 is there; values and terms of keys are free
            if (is_fetcher) fetch(params.v, &s.v_full, s.v, key);
        }
        FullBarrier::wait(&s.k_full, phase);
        auto lower = rows.template multiply_qk<kN>(s.k, s.pos_q[(n + 1) & 1]);
        auto upper = rows.template multiply_qk<kN>(s.k, s.pos_q[n & 1]);
        auto products = rows.template multiply_qk<kN>(s.q, s.pos_k[(n + 1) & 1]);
        if (has_next) find_block(n + 2);  // buckets arrive beside the products
        wait_for_products<1>();
        lower.pin();
        upper.pin();
        put_key_terms(lower, upper, s.key_terms, warp, lane);
        auto scores = rows.template multiply_qk<kN>(s.q, s.k);
        wait_for_products<1>();
        products.pin();
        put_query_terms<false>(products, s.query_terms, warp, lane);
        wait_for_products<0>();
        scores.pin();
        __syncthreads();  // all terms are there; keys and block n are free
        if (has_next) {
            if (is_fetcher) fetch(params.k, &s.k_full, s.k, key + kN);
            copy_block(n + 2);
            commit_copies();
        }
        add_terms(scores, s.query_terms, s.key_terms, warp, lane);
        __syncwarp();  // the warp has read its queries' terms
        if (has_next) put_query_terms<true>(products, s.query_terms, warp, lane);
        rows.template add_values<kN>(
            scores, s.v, key, params.power_scale, [] {},
            [&] { FullBarrier::wait(&s.v_full, phase); });
    }
    store_rows<C>(rows, tile.seqlen - tile.row, DisentangledTarget<C>{p, tile, head});
}

template <typename C>
void launch_disentangled(const DisentangledAttentionParams& p, cudaStream_t stream) {
    const auto map_rows = [&](const void* rows, int64_t stride) {
        return make_map<C>(p.dtype, rows, stride, p.total_tokens, p.num_heads, p.head_dim,
                           kTileRows);
    };
    DisentangledParams params{};
    params.q = map_rows(p.q, p.q_stride);
    params.k = map_rows(p.k, p.k_stride);
    params.v = map_rows(p.v, p.v_stride);
    params.p = p;
    if (p.pos_k == nullptr && p.pos_q == nullptr) params.p.buckets = nullptr;
    params.power_scale = p.softmax_scale * kLog2e;
    constexpr auto kKernel = disentangled_kernel<C>;
    constexpr int kSmemBytes = sizeof(DisentangledSmem<C>);
    allow_smem_once<kKernel>(kSmemBytes);
    const int64_t num_tiles = p.total_tokens / kTileRows + p.batch_size;
    const dim3 grid(static_cast<unsigned>(num_tiles * p.num_heads));
    launch_kernel(kKernel, LaunchShape{grid, C::kThreads, kSmemBytes, stream}, params);
}

}  // namespace
}  // namespace attention

namespace {

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

void check(const DisentangledAttentionParams& p) {
    const auto fail = [](const std::string& what) {
        throw std::invalid_argument("disentangled_attention needs " + what);
    };
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) fail("f16 or bf16");
    if (p.head_dim <= 0 || p.head_dim > 128 || p.head_dim % 8 != 0) {
        fail("head_dim a multiple of 8 up to 128, got " + std::to_string(p.head_dim));
    }
    for (const int64_t stride : {p.q_stride, p.k_stride, p.v_stride, p.out_stride}) {
        if (stride % 8 != 0) {
            fail("row strides that are multiples of 8, got " + std::to_string(stride));
        }
    }
    for (const void* address : {p.q, p.k, p.v, p.pos_k, p.pos_q, (const void*)p.out}) {
        if (!is_aligned(address)) fail("16-byte aligned addresses");
    }
    if (!(p.softmax_scale > 0.0f)) {
        fail("softmax_scale > 0, got " + std::to_string(p.softmax_scale));
    }
    const bool has_buckets = p.pos_k != nullptr || p.pos_q != nullptr;
    if (has_buckets && (p.buckets == nullptr || p.span < 1 || p.num_buckets < 1)) {
        fail("buckets with pos_k and pos_q");
    }
}

}  // namespace

void disentangled_attention(const DisentangledAttentionParams& p, const Launch& launch) {
    check(p);
    if (p.total_tokens == 0 || p.batch_size == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_at_least<64, 128>(p.head_dim, [&]<int kDim>() {
        if (p.dtype == DType::f16) {
            attention::launch_disentangled<attention::DisentangledTypes<Half, kDim>>(p, stream);
        } else {
            attention::launch_disentangled<attention::DisentangledTypes<BFloat16, kDim>>(p, stream);
        }
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
