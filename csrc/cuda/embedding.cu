// Embedding of packed ids: gather, sum and layer norm in one pass.
//
//   h = word[input_ids] + token_type[token_type_ids] + position[position_ids];  out = layer_norm(h)
//
// Tables [rows, hidden_size], norm_weight, norm_bias [hidden_size] and out [total_tokens,
// hidden_size], all of one dtype (f32, f16, bf16); ids int32 [total_tokens]. h and the statistics
// are f32, summed in Hugging Face's order. Without norm_weight, out is h rounded. An id outside its
// table reads the nearest row: the host checks ids, the kernel only stays inside the tables.
//
// embed_kernel: rows whose bytes are a multiple of 16. A row lives in the registers of a warp or of
// a CTA, as in common/row_norm.cuh; the loads of all its tables are in flight before the first is
// used. embed_any_kernel: every other size; one CTA a row, element by element.
//
// Bytes: one row of each table read and one row written a token. Token types, positions and what
// repeats of the words come from L2, so HBM carries about 2 * total_tokens * hidden_size *
// sizeof(T); that bounds it. Fraction reached: csrc/README.md. Source: standard.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/row_norm.cuh"
#include "ops.h"

namespace bytetx {
namespace {

// The row of `table` that token `row` names, as an offset in rows.
__device__ __forceinline__ int64_t table_row(const int32_t* ids, int64_t row, int64_t num_rows) {
    const int64_t id = __ldg(ids + row);
    return id < 0 ? 0 : id < num_rows ? id : num_rows - 1;
}

// Row `row` of the word table, or of what stands in its place.
__device__ __forceinline__ int64_t word_row(const EmbedParams& p, int64_t row) {
    return p.inputs_embeds != nullptr ? row : table_row(p.input_ids, row, p.num_words);
}

// One thread's share of a row as it lies in memory; zeros until it is loaded. The words are untyped
// because 16-bit elements that may be zero or loaded cost a register each.
template <typename T, typename Tiling>
struct RawRow {
    uint4 words[Tiling::kVecsPerThread] = {};

    __device__ __forceinline__ void load(const void* table, int64_t row, int lane, int num_vecs) {
        const uint4* first = static_cast<const uint4*>(table) + row * num_vecs;
#pragma unroll
        for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
            const int v = lane + i * Tiling::kThreadsPerRow;
            if (v < num_vecs) words[i] = __ldg(first + v);
        }
    }

    __device__ __forceinline__ float get(int i, int j) const {
        return static_cast<float>(reinterpret_cast<const Vec<T>*>(&words[i])->value[j]);
    }
};

template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kCtaThreads)
    embed_kernel(const __grid_constant__ EmbedParams p) {
    const RowPlace<Tiling> place;
    if (place.row >= p.total_tokens) return;  // whole warps: only a tiling without barriers does so
    const int lane = place.lane;
    const int num_vecs = static_cast<int>(p.hidden_size / kVecSize<T>);

    RawRow<T, Tiling> word;
    RawRow<T, Tiling> token_type;
    RawRow<T, Tiling> position;
    word.load(p.inputs_embeds != nullptr ? p.inputs_embeds : p.word, word_row(p, place.row), lane,
              num_vecs);
    if (p.token_type != nullptr) {
        token_type.load(p.token_type, table_row(p.token_type_ids, place.row, p.num_token_types),
                        lane, num_vecs);
    }
    if (p.position != nullptr) {
        position.load(p.position, table_row(p.position_ids, place.row, p.num_positions), lane,
                      num_vecs);
    }

    RowRegisters<T, Tiling> h;
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) {
            h[i][j] = word.get(i, j) + token_type.get(i, j) + position.get(i, j);
        }
    }
    const int64_t first_vec = place.row * num_vecs;
    if (p.norm_weight != nullptr) {
        const RowNorm norm{p.norm_weight, p.norm_bias, p.hidden_size, p.eps};
        return store_normed_row<T, Tiling>(h, lane, first_vec, norm, p.out);
    }
#pragma unroll
    for (int i = 0; i < Tiling::kVecsPerThread; ++i) {
        const int v = lane + i * Tiling::kThreadsPerRow;
        if (v >= num_vecs) continue;
        Vec<T> sum;
#pragma unroll
        for (int j = 0; j < kVecSize<T>; ++j) sum.value[j] = static_cast<T>(h[i][j]);
        store_vec<T>(p.out, first_vec + v, sum);
    }
}

template <typename T>
__global__ void __launch_bounds__(kCtaThreads)
    embed_any_kernel(const __grid_constant__ EmbedParams p) {
    const int64_t row = blockIdx.x;
    const int64_t n = p.hidden_size;
    const T* word =
        static_cast<const T*>(p.inputs_embeds != nullptr ? p.inputs_embeds : p.word) +
        word_row(p, row) * n;
    const T* token_type = static_cast<const T*>(p.token_type);
    const T* position = static_cast<const T*>(p.position);
    if (token_type) token_type += table_row(p.token_type_ids, row, p.num_token_types) * n;
    if (position) position += table_row(p.position_ids, row, p.num_positions) * n;
    const auto load_h = [&](int64_t i) {
        const float typed = token_type ? static_cast<float>(token_type[i]) : 0.0f;
        const float placed = position ? static_cast<float>(position[i]) : 0.0f;
        return static_cast<float>(word[i]) + typed + placed;
    };
    T* out = static_cast<T*>(p.out) + row * n;
    if (p.norm_weight != nullptr) {
        return store_normed_any_row<T>(load_h, {p.norm_weight, p.norm_bias, n, p.eps}, out);
    }
    for (int64_t i = threadIdx.x; i < n; i += kCtaThreads) out[i] = static_cast<T>(load_h(i));
}

void check(const EmbedParams& p) {
    if (p.total_tokens < 0 || p.total_tokens > INT32_MAX || p.hidden_size <= 0) {
        throw std::invalid_argument(
            "embed needs 0 <= total_tokens < 2^31, hidden_size > 0; got " +
            std::to_string(p.total_tokens) + " and " + std::to_string(p.hidden_size));
    }
    const bool is_empty = (p.inputs_embeds == nullptr && p.num_words < 1) ||
                          (p.position != nullptr && p.num_positions < 1) ||
                          (p.token_type != nullptr && p.num_token_types < 1);
    if (p.total_tokens > 0 && is_empty) {
        throw std::invalid_argument(
            "embed needs tables with rows; got " + std::to_string(p.num_words) + " words, " +
            std::to_string(p.num_positions) + " positions, " + std::to_string(p.num_token_types) +
            " token types");
    }
}

}  // namespace

void embed(const EmbedParams& p, const Launch& launch) {
    check(p);
    if (p.total_tokens == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    dispatch_dtype(p.dtype, [&]<typename T>() {
        const auto launch_tiled = [&]<typename Tiling>() {
            embed_kernel<T, Tiling>
                <<<num_row_ctas<Tiling>(p.total_tokens), Tiling::kCtaThreads, 0, stream>>>(p);
        };
        if (fits_vecs<T>(p.hidden_size, p.word, p.position, p.token_type, p.inputs_embeds,
                         p.norm_weight, p.norm_bias, p.out) &&
            dispatch_row_tiling<T>(p.hidden_size, launch_tiled)) {
            return;
        }
        embed_any_kernel<T><<<static_cast<unsigned>(p.total_tokens), kCtaThreads, 0, stream>>>(p);
    });
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
