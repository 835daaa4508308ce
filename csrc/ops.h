// The contract of the native core: one params struct and one declaration per op. csrc/cpu/ and
// csrc/cuda/ both implement it, in two separate modules (_cpu and _cuda) that hide their symbols,
// so one name serves both. No CUDA, Python or torch header is included here.
//
// For every op: pointers are the caller's and stay valid until the call returns (cpu) or the stream
// has run it (cuda); nothing is allocated and nothing synchronises; a size of zero is no work.
// Caller's faults throw std::invalid_argument, failures of the device std::runtime_error.
#pragma once

#include <cstdint>

namespace bytetx {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

// Sets of the instructions that cpu/ kernels are compiled for, a bit each, joined with |. A kernel
// runs where a set has all that it needs; no instruction stands for another one.
enum class Isa : int {
    automatic = 0,  // all that the machine has
    portable = 1,   // in every set
    avx2 = 2,       // and FMA
    avx512 = 4,     // F, BW, DQ and VL
    avx512_vnni = 8,
    avx512_bf16 = 16,
    neon = 32,  // 64-bit ARM's, as those below
    neon_dotprod = 64,
    neon_i8mm = 128,
    neon_bf16 = 256,
    amx_int8 = 512,  // tiles, with AVX-512 VNNI and bf16
    // A trait: vdpbf16ps makes fewer products a cycle than f32's multiply-add.
    slow_bf16_dot = 1024,
};

// Where an op runs. cuda/ reads device and stream, cpu/ reads num_threads and isa.
struct Launch {
    int device;
    void* stream;  // a cudaStream_t
    int num_threads;
    Isa isa;
};

// h = x + residual, in f32. layer_norm: out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias;
// rms_norm: out = h / sqrt(mean(h^2) + eps) * weight. Statistics in f32.
struct NormParams {
    const void* x;         // [total_tokens, hidden_size], dtype, contiguous
    const void* residual;  // as x, or null for none
    void* out;             // as x; may be x or residual itself
    void* sum_out;         // h, as x; may be x or residual itself but not out; or null
    const void* weight;    // [hidden_size], dtype
    const void* bias;      // [hidden_size], dtype, or null for none; null for rms_norm
    uint8_t* out_fp8;      // cuda: what quantize_rows makes of out, as are its limits; or null
    float* out_scale;      // [total_tokens], where out_fp8 is given
    int64_t total_tokens;
    int64_t hidden_size;
    float eps;
    DType dtype;
};

void layer_norm(const NormParams& p, const Launch& launch);
void rms_norm(const NormParams& p, const Launch& launch);

// cuda only. amax = max(|x[i]|, 2^-100); out_scale[i] = amax / 448; out_fp8[i] = e4m3(x[i] * (448 /
// amax)), to nearest even. Rows of 16 bytes' multiples, up to 16384 f32 or 32768 16-bit elements.
struct QuantizeRowsParams {
    const void* x;     // [total_tokens, hidden_size], dtype, contiguous
    uint8_t* out_fp8;  // as x, E4M3
    float* out_scale;  // [total_tokens]
    int64_t total_tokens;
    int64_t hidden_size;
    DType dtype;
};

void quantize_rows(const QuantizeRowsParams& p, const Launch& launch);

// cuda only. The first largest logit of each row, -1 where it is not finite or the row has a NaN.
struct ArgmaxParams {
    const void* logits;           // [num_rows, vocab_size], dtype, contiguous
    const int32_t* slot_indices;  // [num_rows], places of last_tokens; or null
    int32_t* out;                 // [num_rows]
    int32_t* last_tokens;  // [slot_indices + 1]: takes max(out[i], 0) at slot_indices[i]; null with
                           // slot_indices
    int64_t num_rows;
    int64_t vocab_size;
    DType dtype;
};

void argmax(const ArgmaxParams& p, const Launch& launch);

// cuda only. A token of each row: drawn from softmax(logits / temperature) among those that the
// limits keep, the first largest logit where the temperature is 0, -1 where argmax gives that.
struct SampleParams {
    const void* logits;        // [num_rows, vocab_size], dtype, contiguous; up to 524 288 tokens
    const float* temperature;  // [num_rows]
    const int64_t* top_k;      // [num_rows], 0 keeps all; or null, as the others
    const float* top_p;        // [num_rows], 1 keeps all
    const float* min_p;        // [num_rows], 0 keeps all
    const int64_t* seeds;      // [num_rows], of counted random numbers
    const int64_t* positions;  // [num_rows], of the number that is used
    int32_t* out;              // [num_rows]
    int64_t num_rows;
    int64_t vocab_size;
    DType dtype;
};

void sample(const SampleParams& p, const Launch& launch);

// out[i] = layer_norm(word[input_ids[i]] + position[position_ids[i]] + token_type[...]), summed in
// f32. An id outside its table: on a CPU it throws before anything is written, and names id, index
// and table; on a GPU the nearest row is read, and where bad_ids is given, one such id of each
// table goes there and the token's row of out is NaN.
struct EmbedParams {
    const int32_t* input_ids;       // [total_tokens], or null where inputs_embeds is given
    const int32_t* position_ids;    // [total_tokens], read where position is given
    const int32_t* token_type_ids;  // [total_tokens], read where token_type is given
    const void* word;               // [num_words, hidden_size], dtype, contiguous like all tables
    const void* position;           // [num_positions, hidden_size], or null for none
    const void* token_type;         // [num_token_types, hidden_size], or null for none
    const void* inputs_embeds;      // [total_tokens, hidden_size] in place of word, or null
    const void* norm_weight;        // [hidden_size], or null for no norm
    const void* norm_bias;          // [hidden_size], or null for none
    void* out;                      // [total_tokens, hidden_size], dtype
    int32_t* bad_ids;               // [3] of word, position, token_type, or null; not on a CPU
    int64_t total_tokens;
    int64_t hidden_size;
    int64_t num_words;
    int64_t num_positions;
    int64_t num_token_types;
    float eps;
    DType dtype;
};

void embed(const EmbedParams& p, const Launch& launch);

enum class Activation : int { none = 0, gelu = 1, gelu_tanh = 2, relu = 3, silu = 4, tanh = 5 };

// cuda only. d = act(a b^T + bias + residual), f32 accumulation. Gated: of every 64 rows of b the
// first 32 are gates, the others their values, and d = act(gates) * values has n / 2 columns.
struct LinearParams {
    const void* a;         // [m, k], dtype, contiguous and 16-byte aligned like all operands
    const void* b;         // [n, k]
    const void* bias;      // [n], or null for none
    const void* residual;  // [m, n], or null for none; only with activation none
    void* d;               // [m, n]; gated: [m, n / 2]; not a, may be the residual
    int64_t m;
    int64_t n;  // a multiple of 32; gated: of 64
    int64_t k;  // a multiple of 8
    Activation activation;
    bool gated;       // with gelu, gelu_tanh or silu; only tilings of 64 or 128 columns
    int32_t tiling;   // an index into linear_tilings()
    int32_t split_k;  // CTAs that share k, 1 to 8; tilings for few rows alone take more than 1
    DType dtype;      // f16 or bf16
};

// One way to cut the product: rows and columns of d that a tile has.
struct LinearTiling {
    const char* name;
    int32_t rows;
    int32_t columns;
    bool is_small_m;
};
int32_t num_linear_tilings();
LinearTiling linear_tiling(int32_t index);
void linear(const LinearParams& p, const Launch& launch);

// cuda only. d = a b^T + bias of any size, each element one chain of sums in f32 in the order of k.
struct LinearAnyParams {
    const void* a;     // [m, k], dtype, contiguous
    const void* b;     // [n, k]
    const void* bias;  // [n], or null for none
    void* d;           // [m, n]
    int64_t m;
    int64_t n;
    int64_t k;
    DType dtype;
};
void linear_any(const LinearAnyParams& p, const Launch& launch);

// cuda only. d = act(a_scale b_scale (a b^T) + bias), a and b E4M3, f32 accumulation.
struct Fp8LinearParams {
    const uint8_t* a;      // [m, k], contiguous and 16-byte aligned like all operands
    const uint8_t* b;      // [n, k]
    const float* a_scale;  // [m], or null for ones
    const float* b_scale;  // [n]
    const float* bias;     // [n], or null for none
    void* d;               // [m, n], dtype, or E4M3 of d / d_scale
    int64_t m;
    int64_t n;  // a multiple of 32
    int64_t k;  // a multiple of 16
    Activation activation;
    bool gated;  // as of LinearParams: d [m, n / 2]; n is a multiple of 64 and d not E4M3
    bool is_d_fp8;
    float d_scale;   // numbers beyond 448 of it are cut off
    int32_t tiling;  // an index into fp8_linear_tilings()
    DType dtype;     // f16 or bf16
};
int32_t num_fp8_linear_tilings();
LinearTiling fp8_linear_tiling(int32_t index);
void fp8_linear(const Fp8LinearParams& p, const Launch& launch);

enum class PoolMode : int {
    cls = 0,
    mean = 1,
    max = 2,
    mean_sqrt_len_tokens = 3,
    weightedmean = 4,
    lasttoken = 5
};

// One vector a sequence, in f32; a sequence with no token left is zeros. On a CPU, lengths that do
// not fit x throw; on a GPU only rows of x are read.
struct PoolParams {
    const void* x;                // [total_tokens, hidden_size], dtype, contiguous
    const int32_t* cu_seqlens;    // [batch_size + 1]
    const int32_t* first_tokens;  // [batch_size], tokens skipped at each start, or null for none
    float* out;                   // [batch_size, hidden_size]
    void* workspace;              // cuda: pool_workspace_bytes(), 16-byte aligned, any content
    int64_t workspace_bytes;
    int64_t batch_size;
    int64_t total_tokens;  // rows there are; those that belong to no sequence are never read
    int64_t max_seqlen;    // no sequence is longer; total_tokens where nothing better is known
    int64_t hidden_size;
    PoolMode mode;
    bool normalize;  // divide each vector by max(its l2 norm, 1e-12); NaN where that overflows
    DType dtype;
};

int64_t pool_workspace_bytes(int64_t total_tokens, int64_t max_seqlen, int64_t hidden_size);
void pool(const PoolParams& p, const Launch& launch);

// out = softmax(q k^T * softmax_scale + bias) v within each sequence and head, accumulated in f32.
// With a softcap, scaled scores s become softcap * tanh(s / softcap). Then score(i, j) gets
// relative_bias[head][position(j) - position(i) + span - 1] where there is one.
// causal hides j > i, a window |i - j| >= window. Query heads h * num_heads / num_kv_heads and on
// share head h of k and v. With key_rows a sequence's keys are these rows, the last of them its
// own: it continues what is before them.
struct VarlenAttentionParams {
    const void* q;                  // [total_tokens, num_heads, head_dim], dtype
    const void* k;                  // [num_keys, num_kv_heads, head_dim]
    const void* v;                  // as k
    void* out;                      // as q
    const int32_t* cu_seqlens;      // [batch_size + 1], starts at 0, ends at total_tokens
    const int32_t* key_rows;        // [cu_keys[batch_size]] in [0, num_keys); null: as those of q
    const int64_t* cu_keys;         // [batch_size + 1], starts at 0: where each sequence's begin
    const float* relative_bias;     // [num_heads, 2 * relative_bias_span - 1], or null for none
    const int32_t* bias_positions;  // [total_tokens] in [0, span), or null: index in the sequence
    const float* sinks;             // [num_heads]: a further score a row, without a value; or null
    void* workspace;                // varlen_attention_workspace_bytes(), any content
    int64_t workspace_bytes;
    int64_t batch_size;
    int64_t total_tokens;
    int64_t num_keys;  // rows of k and v
    int32_t max_seqlen;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t relative_bias_span;  // positions, >= the longest sequence
    int32_t window;              // 0: no limit
    bool causal;
    int64_t q_stride;  // elements from row to row
    int64_t k_stride;
    int64_t v_stride;
    int64_t out_stride;
    float softmax_scale;
    float softcap;  // 0: none
    DType dtype;    // f32 or bf16 on a CPU
};

// cuda only. Which tile owns which rows of a batch, made once on the device and read by every
// layer.
struct AttentionPlanParams {
    const int32_t* cu_seqlens;  // [batch_size + 1], starts at 0; its end may be below total_tokens
    int32_t* plan;              // attention_plan_bytes(), 16-byte aligned, any content
    int64_t plan_bytes;
    int64_t batch_size;
    int64_t total_tokens;  // rows there are; those from cu_seqlens[batch_size] on are padding
    int32_t tile_rows;     // 64, 128 or 192, from attention_tile_rows()
    int32_t window;        // as in PlannedAttentionParams
    bool causal;
    bool batch_invariant;  // every sequence opens a tile, of 64 rows
};

int32_t attention_tile_rows(int64_t batch_size, int64_t total_tokens, int32_t head_dim);
int64_t attention_plan_bytes(int64_t batch_size, int64_t total_tokens, int32_t tile_rows,
                             bool batch_invariant);
void attention_plan(const AttentionPlanParams& p, const Launch& launch);

// cuda only. As varlen_attention on f16 and bf16, with masks and grouped key heads. Rows that
// belong to no sequence are neither read by the others nor written.
struct PlannedAttentionParams {
    const void* q;                  // [total_tokens, num_heads, head_dim], dtype, 16-byte aligned
    const void* k;                  // [num_keys, num_kv_heads, head_dim]
    const void* v;                  // as k
    void* out;                      // as q
    int32_t* plan;                  // attention_plan's, of the same sizes, window and causal; one
                                    // call at a time, for the kernel counts in it
    const float* relative_bias;     // [num_heads, 2 * relative_bias_span - 1], or null for none
    const int32_t* bias_positions;  // [total_tokens] in [0, span), or null: index in the sequence
    int64_t batch_size;
    int64_t total_tokens;
    int64_t num_keys;   // total_tokens, or more in a tree
    int64_t num_tiles;  // in a plan with a tree (cuda/attention_plan.cuh); else 0
    int32_t tile_rows;
    int32_t num_heads;
    int32_t num_kv_heads;  // divides num_heads
    int32_t head_dim;      // a multiple of 8 up to 256
    int32_t relative_bias_span;
    int32_t window;    // keys a row sees, its own the last of them; 0: from the sequence's first
    bool causal;       // no key after the row
    int64_t q_stride;  // elements from row to row, multiples of 8
    int64_t k_stride;
    int64_t v_stride;
    int64_t out_stride;
    float softmax_scale;  // > 0
    float softcap;        // 0: none
    DType dtype;
    bool batch_invariant;  // as the plan's: one kernel for all lengths and batches
};

void planned_attention(const PlannedAttentionParams& p, const Launch& launch);

int64_t varlen_attention_workspace_bytes(int64_t batch_size, int32_t head_dim, int num_threads);
void varlen_attention(const VarlenAttentionParams& p, const Launch& launch);

}  // namespace bytetx
