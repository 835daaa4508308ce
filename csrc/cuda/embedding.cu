// Embedding of packed ids: gather, sum and layer norm in one pass.
//
//   h = word[input_ids] + token_type[token_type_ids] + position[position_ids];  out = layer_norm(h)
//
// Tables [rows, hidden_size], norm_weight, norm_bias [hidden_size] and out [total_tokens,
// hidden_size], all of one dtype (f32, f16, bf16); ids int32 [total_tokens]. h and the statistics
// are f32, summed in Hugging Face's order. Without norm_weight, out is h rounded. An id outside its
// table reads the nearest row, so that the kernel stays inside the tables; where the caller gives
// bad_ids, because no host checked the ids, it is noted there and the token's row of out is NaN.
//
// embed_kernel: rows whose bytes are a multiple of 16. A row lives in the registers of a warp, of
// half a warp or of a CTA, as in common/row_norm.cuh. A warp owns up to 16 neighbouring tokens:
// their ids come in one access a table, their word and position rows through a ring in shared
// memory, some tokens ahead.
// embed_any_kernel: every other size; one CTA a row, element by element.
//
// Bytes: one row of each table read and one row written a token. Positions and what repeats of the
// words come from L2, token types from L1, so HBM carries at most 2 * total_tokens * hidden_size *
// sizeof(T), and L2 half as much again, which bounds narrow rows. Fraction reached:
// docs/kernels/norm-embedding-pooling.md.
// Source: standard.

#include <math_constants.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/row_norm.cuh"
#include "ops.h"

namespace bytetx {
namespace {

// Per CTA: with one row per warp 48 KB took 4 to 14 % longer on an H200, with two rows 24 KB.
template <typename Tiling>
constexpr int kRingBytes = (Tiling::kRowsPerWarp > 1 ? 48 : 24) * 1024;
// Per warp, or per CTA that owns a row. At 32k tokens 16 took 5 to 7 % longer than 4 with a row a
// warp (8 up to 5 %, 2 up to 4 %), and with two rows 1 % longer than 8 (4 took 4 %; all H100):
// where a warp's work is long, reads at the beginning and writes at the end have the memory to
// themselves.
template <typename Tiling>
constexpr int kMostTokens = Tiling::kThreadsPerRow > kWarpSize ? 16 : 4 * Tiling::kRowsPerWarp;

// Columns of bad_ids.
constexpr int kInputId = 0, kPositionId = 1, kTokenTypeId = 2;

// Mark in TokenRows::token_type: the token's row of out is NaN. It travels with a row that every
// lane asks for anyway, so that ids inside their tables cost nothing more.
constexpr int kBadToken = INT32_MIN;

// The rows of its tables that one token is the sum of.
struct TokenRows {
    int word;        // or of inputs_embeds
    int token_type;  // with kBadToken
    int position;
};

// Lane i of a warp gets the rows of token first + i, so that one access finds those of 32 tokens.
__device__ __forceinline__ TokenRows find_rows(const EmbedParams& p, int64_t token) {
    TokenRows rows{};
    if (token >= p.total_tokens) return rows;
    // All before the first is looked at, or each waits for the one before.
    const int word = p.inputs_embeds == nullptr ? p.input_ids[token] : 0;
    const int type = p.token_type != nullptr ? p.token_type_ids[token] : 0;
    const int placed = p.position != nullptr ? p.position_ids[token] : 0;
    bool is_bad = false;
    const auto table_row = [&](int id, int64_t num_rows, int column) {
        if (id >= 0 && id < num_rows) return id;
        if (p.bad_ids != nullptr) {
            // Any one of several: never 0, which is inside every table.
            atomicExch(p.bad_ids + column, id);
            is_bad = true;
        }
        return id < 0 ? 0 : static_cast<int>(num_rows - 1);
    };
    rows.word = p.inputs_embeds != nullptr ? static_cast<int>(token)
                                           : table_row(word, p.num_words, kInputId);
    if (p.token_type != nullptr) {
        rows.token_type = table_row(type, p.num_token_types, kTokenTypeId);
    }
    if (p.position != nullptr) rows.position = table_row(placed, p.num_positions, kPositionId);
    if (is_bad) rows.token_type |= kBadToken;
    return rows;
}

// Rows of the word and position tables on their way, for some tokens ahead; a thread copies what it
// alone reads.
template <typename Tiling>
struct TokenRing {
    static constexpr int kTables = 2;
    static constexpr int kTokenBytes =
        kTables * Tiling::kVecsPerThread * Tiling::kCtaThreads * kVecBytes;
    static constexpr int kTokens = std::clamp(kRingBytes<Tiling> / kTokenBytes, 3, 8);

    uint4 vecs[kTokens][kTables][Tiling::kVecsPerThread][Tiling::kCtaThreads];
};

template <typename T, typename Tiling>
__device__ __forceinline__ void fill_nan(RowRegisters<T, Tiling>& h) {
#pragma unroll
    for (auto& vec : h) {
#pragma unroll
        for (float& value : vec) value = CUDART_NAN_F;
    }
}

// tokens_per_warp: neighbouring tokens of a warp (of a CTA, where it owns a row), at most
// kMostTokens.  kIsFull: rows fill their registers.
template <typename T, typename Tiling, RowNorm kNorm, bool kIsFull>
__global__ void __launch_bounds__(Tiling::kCtaThreads, 1)
    embed_kernel(const __grid_constant__ EmbedParams p, const int tokens_per_warp,
                 const bool streams) {
    extern __shared__ __align__(16) unsigned char smem[];
    auto& ring = *reinterpret_cast<TokenRing<Tiling>*>(smem);
    constexpr int kTokens = TokenRing<Tiling>::kTokens;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % Tiling::kThreadsPerRow;
    const int64_t hidden_size = kIsFull ? kFullRow<T, Tiling> : p.hidden_size;
    const int num_vecs = static_cast<int>(hidden_size / kVecSize<T>);
    constexpr int kOwnerThreads = std::max(Tiling::kThreadsPerRow, kWarpSize);
    constexpr int kMates = Tiling::kRowsPerWarp;
    const int mate = thread / Tiling::kThreadsPerRow % kMates;  // whose row this thread has
    const int64_t owner =
        int64_t{blockIdx.x} * (Tiling::kCtaThreads / kOwnerThreads) + thread / kOwnerThreads;
    const int64_t first = owner * tokens_per_warp;
    const int count =
        static_cast<int>(max(min(int64_t{tokens_per_warp}, p.total_tokens - first), int64_t{0}));
    // Where the last token has no mate, both halves of its warp compute it and store the same.
    const auto own_token = [&](int i) { return min(i + mate, count - 1); };
    release_next_kernel();
    const RowParameter<Tiling> weight(p.norm_weight, lane, num_vecs);
    const RowParameter<Tiling> bias(p.norm_bias, lane, num_vecs);
    wait_for_prior_kernel();
    const TokenRows found = find_rows(p, first + thread % kWarpSize);
    const auto* words =
        static_cast<const uint4*>(p.inputs_embeds != nullptr ? p.inputs_embeds : p.word);
    const auto* positions = static_cast<const uint4*>(p.position);
    const auto* types = static_cast<const uint4*>(p.token_type);

    const auto copy_row = [&](int slot, int table, const uint4* rows, int row) {
        const uint4* from = rows + int64_t{row} * num_vecs + lane;
#pragma unroll
        for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
            const int v = i * Tiling::kThreadsPerRow;
            if (lane + v < num_vecs) copy_async(&ring.vecs[slot][table][i][thread], from + v);
        }
    };
    int next = 0;
    int next_slot = 0;
    const auto copy_next = [&] {
        if (next < count) {
            const int token = own_token(next);
            copy_row(next_slot, 0, words, __shfl_sync(0xffffffffu, found.word, token));
            const int placed = __shfl_sync(0xffffffffu, found.position, token);
            if (positions != nullptr) copy_row(next_slot, 1, positions, placed);
        }
        commit_copies();
        next += kMates;
        next_slot = next_slot + 1 == kTokens ? 0 : next_slot + 1;
    };
#pragma unroll
    for (int i = 0; i < kTokens - 1; ++i) copy_next();
    int slot = 0;
    for (int i = 0; i < count; i += kMates) {
        const int token = own_token(i);
        const int typed = __shfl_sync(0xffffffffu, found.token_type, token);
        const uint4* type_row = types + int64_t{typed & ~kBadToken} * num_vecs + lane;
        wait_for_copies<kTokens - 2>();
        RowRegisters<T, Tiling> h;
#pragma unroll
        for (int k = 0; k < Tiling::kVecsPerThread; ++k) {
            const int v = k * Tiling::kThreadsPerRow;
            const bool is_in_row = lane + v < num_vecs;
            const uint4 word = is_in_row ? ring.vecs[slot][0][k][thread] : uint4{};
            const uint4 type = is_in_row && types != nullptr ? __ldg(type_row + v) : uint4{};
            const uint4 position =
                is_in_row && positions != nullptr ? ring.vecs[slot][1][k][thread] : uint4{};
#pragma unroll
            for (int j = 0; j < kVecSize<T>; ++j) {
                h[k][j] = element<T>(word, j) + element<T>(type, j) + element<T>(position, j);
            }
        }
        if (typed & kBadToken) fill_nan<T, Tiling>(h);
        slot = slot + 1 == kTokens ? 0 : slot + 1;
        copy_next();  // over the token before this one
        store_normalized_row<T, Tiling, kNorm>(h, lane, first + token, weight, bias, hidden_size,
                                               p.eps, {p.out, nullptr, nullptr, streams});
    }
}

template <typename T>
__global__ void __launch_bounds__(kCtaThreads)
    embed_any_kernel(const __grid_constant__ EmbedParams p) {
    release_next_kernel();
    wait_for_prior_kernel();
    const int64_t row = blockIdx.x;
    const int64_t n = p.hidden_size;
    const TokenRows found = find_rows(p, row);
    const bool is_bad = found.token_type & kBadToken;
    const T* word = static_cast<const T*>(p.inputs_embeds != nullptr ? p.inputs_embeds : p.word) +
                    int64_t{found.word} * n;
    const T* token_type = static_cast<const T*>(p.token_type);
    const T* position = static_cast<const T*>(p.position);
    if (token_type) token_type += int64_t{found.token_type & ~kBadToken} * n;
    if (position) position += int64_t{found.position} * n;
    const auto load_h = [&](int64_t i) {
        const float typed = token_type ? static_cast<float>(token_type[i]) : 0.0f;
        const float placed = position ? static_cast<float>(position[i]) : 0.0f;
        return is_bad ? CUDART_NAN_F : static_cast<float>(word[i]) + typed + placed;
    };
    T* out = static_cast<T*>(p.out) + row * n;
    if (p.norm_weight != nullptr) {
        const auto store = [&](int64_t i, float value) { out[i] = static_cast<T>(value); };
        return norm_any_row<T, RowNorm::layer>(load_h, p.norm_weight, p.norm_bias, n, p.eps, store);
    }
    for (int64_t i = threadIdx.x; i < n; i += kCtaThreads) out[i] = static_cast<T>(load_h(i));
}

void check(const EmbedParams& p) {
    if (p.total_tokens < 0 || p.total_tokens > INT32_MAX || p.hidden_size <= 0) {
        throw std::invalid_argument("embed needs 0 <= total_tokens < 2^31, hidden_size > 0; got " +
                                    std::to_string(p.total_tokens) + " and " +
                                    std::to_string(p.hidden_size));
    }
    const bool is_empty = (p.inputs_embeds == nullptr && p.num_words < 1) ||
                          (p.position != nullptr && p.num_positions < 1) ||
                          (p.token_type != nullptr && p.num_token_types < 1);
    if (p.total_tokens > 0 && is_empty) {
        throw std::invalid_argument("embed needs tables with rows; got " +
                                    std::to_string(p.num_words) + " words, " +
                                    std::to_string(p.num_positions) + " positions, " +
                                    std::to_string(p.num_token_types) + " token types");
    }
}

template <typename T, typename Tiling, RowNorm kNorm, bool kIsFull>
void launch_rows(const EmbedParams& p, const Launch& launch, cudaStream_t stream) {
    const auto kernel = embed_kernel<T, Tiling, kNorm, kIsFull>;
    constexpr int kSmemBytes = sizeof(TokenRing<Tiling>);
    static const int64_t resident =
        resident_ctas(kernel, Tiling::kCtaThreads, kSmemBytes, launch.device);
    constexpr int kMates = Tiling::kRowsPerWarp;
    const int64_t owners = Tiling::kRowsPerCta / kMates;  // owners of rows per CTA
    const int64_t rounds =
        (p.total_tokens + resident * owners * kMates - 1) / (resident * owners * kMates);
    const int64_t tokens_per_warp = std::min(rounds * kMates, int64_t{kMostTokens<Tiling>});
    const int64_t cta_tokens = tokens_per_warp * owners;
    const int64_t grid = (p.total_tokens + cta_tokens - 1) / cta_tokens;
    launch_kernel(
        kernel, {dim3(static_cast<unsigned>(grid)), dim3(Tiling::kCtaThreads), kSmemBytes, stream},
        p, static_cast<int>(tokens_per_warp),
        is_beyond_l2(p.total_tokens * p.hidden_size * sizeof(T), launch.device));
}

template <typename T, RowNorm kNorm>
bool launch_in_registers(const EmbedParams& p, const Launch& launch, cudaStream_t stream) {
    if (!fits_vecs<T>(p.hidden_size, p.word, p.position, p.token_type, p.inputs_embeds,
                      p.norm_weight, p.norm_bias, p.out)) {
        return false;
    }
    return dispatch_packed_row_tiling<T>(p.hidden_size, [&]<typename Tiling>() {
        if (p.hidden_size == kFullRow<T, Tiling>) {
            return launch_rows<T, Tiling, kNorm, true>(p, launch, stream);
        }
        launch_rows<T, Tiling, kNorm, false>(p, launch, stream);
    });
}

}  // namespace

void embed(const EmbedParams& p, const Launch& launch) {
    check(p);
    if (p.total_tokens == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        const bool is_launched = p.norm_weight != nullptr
                                     ? launch_in_registers<T, RowNorm::layer>(p, launch, stream)
                                     : launch_in_registers<T, RowNorm::none>(p, launch, stream);
        if (is_launched) return;
        launch_kernel(embed_any_kernel<T>,
                      {dim3(static_cast<unsigned>(p.total_tokens)), dim3(kCtaThreads), 0, stream},
                      p);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
