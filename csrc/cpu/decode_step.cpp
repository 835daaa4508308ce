// All layers of a decoder for the next tokens of a few sequences, on the CPU.
//
// One parallel region a step: its threads stay together and meet at a barrier where a part reads
// what others wrote.  The parts of a layer:
//
//   norm, product with qkv | head norms, rotation, keys and values to their slots | attention |
//   product with attn_out | residual, norm, product with ffn_in | gates | product with ffn_out
//
// Products are drawn by pieces of outputs, head work by KV heads, attention as in
// paged_attention.cpp. Residuals and norms of the few rows are nothing beside a barrier, so that
// every thread computes them all, into memory of its own. Head work and gates of so few rows that a
// barrier costs more are done by the thread that reaches the one before them last. Each part is the
// kernel of the operation that it stands for, and rounds where it does: the bits are those of one
// call after another.
//
// workspace:  qkv | attended | product | inner | gated | of each thread: x, h, staged rows |
//             that of attention, for each window
// Bound by: the weights' way from memory.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/paged.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"
#include "cpu/rotary.h"
#include "cpu/rows.h"
#include "cpu_step_ops.h"

namespace bytetx {
namespace cpu {
namespace {

int64_t item_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

char* shifted(const void* p, int64_t bytes) {
    return const_cast<char*>(static_cast<const char*>(p)) + bytes;
}

int64_t qkv_width(const CpuDecodeStepParams& p) {
    return (p.num_heads + 2 * int64_t{p.num_kv_heads}) * p.head_dim;
}
int64_t attended_width(const CpuDecodeStepParams& p) { return int64_t{p.num_heads} * p.head_dim; }
int64_t first_width(const CpuDecodeStepParams& p) {
    return int64_t{p.inner_size} * (p.gate_block > 0 ? 2 : 1);
}

// Where the parts of the workspace begin, in bytes.
struct StepLayout {
    int64_t qkv, attended, product, inner, gated, threads, of_thread, h, staged, attention;

    StepLayout(const CpuDecodeStepParams& p, int num_threads) {
        int64_t at = 0;
        const auto take = [&](int64_t bytes) {
            const int64_t begin = at;
            at += aligned(bytes);
            return begin;
        };
        const auto rows = [&](int64_t width) {
            return take(p.batch_size * width * item_bytes(p.dtype));
        };
        qkv = rows(qkv_width(p));
        attended = rows(attended_width(p));
        product = rows(p.hidden_size);
        inner = rows(first_width(p));
        gated = rows(p.inner_size);
        threads = at;
        rows(p.hidden_size);  // x
        h = rows(p.hidden_size) - threads;
        const int64_t widest =
            std::max({int64_t{p.hidden_size}, int64_t{p.inner_size}, attended_width(p)});
        staged = take(p.batch_size * most_row_words(widest) * int64_t{sizeof(float)}) - threads;
        of_thread = at - threads;
        attention = threads + std::max(num_threads, 1) * of_thread;
    }
};

std::vector<int32_t> windows_of(const CpuDecodeStepParams& p) {
    std::vector<int32_t> found;
    for (const CpuStepLayer& layer : p.layers->layers()) {
        if (std::find(found.begin(), found.end(), layer.window) == found.end()) {
            found.push_back(layer.window);
        }
    }
    return found;
}

PagedAttentionParams attention_of(const CpuDecodeStepParams& p, int32_t window) {
    PagedAttentionParams a{};
    a.cu_seqlens = p.cu_seqlens;
    a.page_table = p.page_table;
    a.kv_seqlens = p.kv_seqlens;
    a.alibi_slopes = p.alibi_slopes;
    a.batch_size = a.total_tokens = p.batch_size;
    a.num_pages = p.num_pages;
    a.max_pages = p.max_pages;
    a.page_size = p.page_size;
    a.num_heads = p.num_heads;
    a.num_kv_heads = p.num_kv_heads;
    a.head_dim = p.head_dim;
    a.window = window;
    a.q_stride = qkv_width(p);
    a.softcap = p.softcap;
    a.dtype = p.dtype;
    a.batch_invariant = p.batch_invariant;
    return a;
}

[[noreturn]] void refuse(const std::string& what) {
    throw std::invalid_argument("cpu_decode_step: " + what);
}

void check_shape(const char* name, const PanelMatrix& w, int64_t n, int64_t k, DType dtype) {
    check_panels("cpu_decode_step", w, dtype);
    if (w.n == n && w.k == k) return;
    refuse(std::string(name) + " must be [" + std::to_string(n) + ", " + std::to_string(k) +
           "], got [" + std::to_string(w.n) + ", " + std::to_string(w.k) + "]");
}

RotaryParams rotary_of(const CpuDecodeStepParams& p, const CpuStepLayer& layer) {
    RotaryParams r{};
    r.cos = layer.cos;
    r.sin = layer.sin;
    r.position_ids = p.position_ids;
    r.total_tokens = p.batch_size;
    r.num_positions = layer.num_positions;
    r.head_dim = p.head_dim;
    r.num_pairs = layer.num_pairs;
    r.is_interleaved = layer.is_interleaved;
    r.x_stride = qkv_width(p);
    r.dtype = p.dtype;
    return r;
}

void check(const CpuDecodeStepParams& p) {
    if (p.dtype != DType::f32 && p.dtype != DType::bf16) refuse("dtype must be f32 or bf16");
    if (p.num_kv_heads < 1 || p.num_heads % p.num_kv_heads != 0) {
        refuse("num_kv_heads must divide num_heads");
    }
    if (p.gate_block < 0 || (p.gate_block > 0 && p.inner_size % p.gate_block != 0)) {
        refuse("inner_size must be whole blocks of gates");
    }
    if (p.final_norm.weight == nullptr) refuse("final_norm must be given");
    check_rows("cpu_decode_step", p.dtype, p.hidden_size);
    check_rows("cpu_decode_step", p.dtype, p.head_dim);
    for (const CpuStepLayer& layer : p.layers->layers()) {
        check_shape("qkv", layer.qkv, qkv_width(p), p.hidden_size, p.dtype);
        check_shape("attn_out", layer.attn_out, p.hidden_size, attended_width(p), p.dtype);
        check_shape("ffn_in", layer.ffn_in, first_width(p), p.hidden_size, p.dtype);
        check_shape("ffn_out", layer.ffn_out, p.hidden_size, p.inner_size, p.dtype);
        if (layer.attn_norm.weight == nullptr || layer.ffn_norm.weight == nullptr) {
            refuse("attn_norm and ffn_norm must be given");
        }
        if (layer.cos != nullptr) check_rotary(rotary_of(p, layer));
    }
    const int64_t num_slots = p.num_pages * p.page_size;
    for (int64_t i = 0; i < p.batch_size; ++i) {
        if (p.cu_seqlens[i] != i) refuse("each sequence must have one row");
        if (p.slot_mapping[i] < -1 || p.slot_mapping[i] >= num_slots) {
            throw std::invalid_argument(
                "slot_mapping must be in [-1, " + std::to_string(num_slots) +
                "), the slots of the cache, got " + std::to_string(p.slot_mapping[i]) + " at " +
                std::to_string(i));
        }
    }
}

// State that all threads share.
struct Step {
    const CpuDecodeStepParams& p;
    const Launch& launch;
    Team& team;
    const RowKernels& rows;
    std::array<PanelKernels, 4> kernels;  // by PanelFormat; those of words for gates, too
    const StepLayout& layout;
    const std::vector<int32_t>& windows;
    const std::vector<std::unique_ptr<PagedAttention>>& attention;

    const PanelKernels& of(PanelFormat format) const {
        return kernels[static_cast<size_t>(format)];
    }
};

// One thread's way through the layers.
class Worker {
  public:
    Worker(const Step& step, int32_t thread)
        : step_(step), p_(step.p), thread_(thread), workspace_(static_cast<char*>(p_.workspace)) {
        char* own = workspace_ + step.layout.threads + thread * step.layout.of_thread;
        x_ = own;
        h_ = own + step.layout.h;
        staged_ = reinterpret_cast<float*>(own + step.layout.staged);
        qkv_ = workspace_ + step.layout.qkv;
        attended_ = workspace_ + step.layout.attended;
        product_ = workspace_ + step.layout.product;
        inner_ = workspace_ + step.layout.inner;
        gated_ = workspace_ + step.layout.gated;
    }

    void run() {
        const auto& layers = p_.layers->layers();
        std::memcpy(x_, p_.x, p_.batch_size * p_.hidden_size * item_bytes(p_.dtype));
        norm(layers[0].attn_norm, x_, nullptr, h_);
        for (size_t i = 0; i < layers.size(); ++i) {
            const CpuStepLayer& layer = layers[i];
            const bool few = has_few_rows();
            const auto finish = [&](int64_t begin, int64_t end) {
                finish_heads(layer, begin, end);
            };
            const int64_t num_heads = p_.batch_size * p_.num_kv_heads;
            multiply(layer.qkv, h_, qkv_, Activation::none, [&] {
                if (few) finish(0, num_heads);
            });
            if (!few) step_.team.share(num_heads, 1, finish);
            attend(layer);
            multiply(layer.attn_out, attended_, product_, Activation::none);
            add_and_norm(layer.attn_out_norm, layer.ffn_norm, h_);
            const bool gates = p_.gate_block > 0;
            const int64_t num_gates = gates ? p_.batch_size * gate_pieces() : 0;
            const auto gate = [&](int64_t begin, int64_t end) { this->gate(begin, end); };
            multiply(layer.ffn_in, h_, inner_, gates ? Activation::none : p_.activation, [&] {
                if (few) gate(0, num_gates);
            });
            if (gates && !few) step_.team.share(num_gates, 1, gate);
            multiply(layer.ffn_out, gates ? gated_ : inner_, product_, Activation::none);
            const bool is_last = i + 1 == layers.size();
            if (is_last && thread_ != 0) return;
            add_and_norm(layer.ffn_out_norm, is_last ? p_.final_norm : layers[i + 1].attn_norm,
                         is_last ? static_cast<char*>(p_.out) : h_);
        }
    }

  private:
    // Whether one thread does head work and gates in less time than two barriers take, some 2 us.
    bool has_few_rows() const {
        constexpr int64_t kFewGates = 1 << 12;
        return p_.batch_size * p_.inner_size <= kFewGates;
    }
    int64_t gate_pieces() const { return (p_.inner_size + kGateColumns - 1) / kGateColumns; }

    void norm(const StepNorm& how, const void* x, char* residual, char* out, int64_t num_rows = 0,
              int64_t width = 0) {
        NormParams n{};
        n.x = x;
        n.residual = n.sum_out = residual;
        n.out = out;
        n.weight = how.weight;
        n.bias = how.bias;
        n.total_tokens = num_rows > 0 ? num_rows : p_.batch_size;
        n.hidden_size = width > 0 ? width : p_.hidden_size;
        n.eps = how.eps;
        n.dtype = p_.dtype;
        (how.is_rms ? step_.rows.rms_norm : step_.rows.layer_norm)(n, 0, n.total_tokens);
    }

    // x += product, or its norm, and out = norm(x).
    void add_and_norm(const StepNorm& of_product, const StepNorm& next, char* out) {
        const char* added = product_;
        if (of_product.weight != nullptr) {
            norm(of_product, product_, nullptr, h_);
            added = h_;
        }
        norm(next, added, x_, out);
    }

    void multiply(const PanelMatrix& w, const void* x, void* d, Activation activation) {
        multiply(w, x, d, activation, [] {});
    }

    // after: as in Team::share.
    template <typename After>
    void multiply(const PanelMatrix& w, const void* x, void* d, Activation activation,
                  After&& after) {
        const PanelKernels& kernels = step_.of(w.format);
        kernels.stage(x, p_.batch_size, w.k, staged_);
        const PanelProduct product{w, staged_, d, p_.batch_size, activation};
        step_.team.share(
            num_strips(w), strips_of_task(w, step_.team.size()),
            [&](int64_t begin, int64_t end) { kernels.multiply(product, begin, end); }, after);
    }

    // Head norms, rotation, and keys and values to their slots, for some of the rows' KV heads.
    void finish_heads(const CpuStepLayer& layer, int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            finish_head(layer, task / p_.num_kv_heads, task % p_.num_kv_heads);
        }
    }

    void finish_head(const CpuStepLayer& layer, int64_t row, int64_t kv_head) {
        const int64_t head_bytes = p_.head_dim * item_bytes(p_.dtype);
        const int64_t group = p_.num_heads / p_.num_kv_heads;
        char* qkv = qkv_ + row * qkv_width(p_) * item_bytes(p_.dtype);
        char* q = qkv + kv_head * group * head_bytes;
        char* k = qkv + (p_.num_heads + kv_head) * head_bytes;
        const char* v = qkv + (p_.num_heads + p_.num_kv_heads + kv_head) * head_bytes;
        if (layer.q_norm != nullptr) {
            const auto norm_heads = [&](const void* weight, char* heads, int64_t num_heads) {
                norm({weight, nullptr, p_.head_norm_eps, true}, heads, nullptr, heads, num_heads,
                     p_.head_dim);
            };
            norm_heads(layer.q_norm, q, group);
            norm_heads(layer.k_norm, k, 1);
        }
        if (layer.cos != nullptr && layer.num_pairs > 0) {
            RotaryParams r = rotary_of(p_, layer);
            r.position_ids += row;
            const auto turn = [&](char* heads, int64_t num_heads) {
                r.x = heads;
                r.num_heads = static_cast<int32_t>(num_heads);
                turn_rows(r, 0, 1);
            };
            turn(q, group);
            turn(k, 1);
        }
        const int64_t slot = p_.slot_mapping[row];
        if (slot < 0) return;
        const int64_t at = (slot * p_.num_kv_heads + kv_head) * head_bytes;
        std::memcpy(shifted(layer.k_cache, at), k, head_bytes);
        std::memcpy(shifted(layer.v_cache, at), v, head_bytes);
    }

    void attend(const CpuStepLayer& layer) {
        const auto& windows = step_.windows;
        const auto at = std::find(windows.begin(), windows.end(), layer.window) - windows.begin();
        step_.attention[at]->run_layer(step_.team, thread_, layer.k_cache, layer.v_cache,
                                       layer.softmax_scale);
    }

    // Some of the rows' pieces of kGateColumns.
    void gate(int64_t begin, int64_t end) {
        const GateBlocksParams g{inner_,        gated_,        p_.batch_size, p_.inner_size,
                                 p_.gate_block, p_.activation, p_.dtype};
        for (int64_t task = begin; task < end; ++task) {
            const int64_t column = task % gate_pieces() * kGateColumns;
            step_.of(PanelFormat::words)
                .gate(g, task / gate_pieces(), column, std::min(column + kGateColumns, g.n));
        }
    }

    static constexpr int64_t kGateColumns = 256;

    const Step& step_;
    const CpuDecodeStepParams& p_;
    int32_t thread_;
    char* workspace_;
    char* x_;  // the residual
    char* h_;  // rows that the next product reads
    float* staged_;
    char* qkv_;
    char* attended_;
    char* product_;
    char* inner_;
    char* gated_;
};

}  // namespace

int64_t step_workspace_bytes(const CpuDecodeStepParams& p, int num_threads) {
    int64_t bytes = StepLayout(p, num_threads).attention;
    for (const int32_t window : windows_of(p)) {
        bytes += aligned(PagedAttention::workspace_bytes(attention_of(p, window), num_threads));
    }
    return bytes;
}

}  // namespace cpu

int64_t cpu_decode_step_workspace_bytes(const CpuStepLayers* layers, const int32_t* cu_seqlens,
                                        const int32_t* kv_seqlens, int64_t batch_size,
                                        int32_t hidden_size, int32_t inner_size, int32_t num_heads,
                                        int32_t num_kv_heads, int32_t head_dim, int32_t gate_block,
                                        DType dtype, bool batch_invariant, int num_threads) {
    CpuDecodeStepParams p{};
    p.layers = layers;
    p.cu_seqlens = cu_seqlens;
    p.kv_seqlens = kv_seqlens;
    p.batch_size = batch_size;
    p.hidden_size = hidden_size;
    p.inner_size = inner_size;
    p.num_heads = num_heads;
    p.num_kv_heads = num_kv_heads;
    p.head_dim = head_dim;
    p.gate_block = gate_block;
    p.dtype = dtype;
    p.batch_invariant = batch_invariant;
    return cpu::step_workspace_bytes(p, num_threads);
}

void cpu_decode_step(const CpuDecodeStepParams& p, const Launch& launch) {
    using namespace cpu;
    if (p.batch_size == 0) return;
    if (p.layers->layers().empty()) refuse("layers must not be empty");
    check(p);
    if (p.workspace_bytes < step_workspace_bytes(p, launch.num_threads)) {
        refuse("the workspace is too small");
    }
    const Isa isa = resolve_isa(launch.isa);
    std::array<PanelKernels, 4> kernels;
    for (int i = 0; i < 4; ++i) {
        kernels[i] = panel_kernels(isa, p.dtype, static_cast<PanelFormat>(i));
    }
    if (kernels[0].multiply == nullptr) refuse("no kernel for this instruction set");
    for (const CpuStepLayer& layer : p.layers->layers()) {
        for (const PanelMatrix* w : {&layer.qkv, &layer.attn_out, &layer.ffn_in, &layer.ffn_out}) {
            if (kernels[static_cast<size_t>(w->format)].multiply == nullptr) {
                refuse("no kernel for this instruction set and format of weights");
            }
        }
    }
    const StepLayout layout(p, launch.num_threads);
    const std::vector<int32_t> windows = windows_of(p);
    std::vector<std::unique_ptr<PagedAttention>> attention;
    char* at = static_cast<char*>(p.workspace) + layout.attention;
    for (const int32_t window : windows) {
        PagedAttentionParams a = attention_of(p, window);
        a.q = static_cast<char*>(p.workspace) + layout.qkv;
        a.out = static_cast<char*>(p.workspace) + layout.attended;
        a.workspace = at;
        a.workspace_bytes = PagedAttention::workspace_bytes(a, launch.num_threads);
        at += aligned(a.workspace_bytes);
        attention.push_back(std::make_unique<PagedAttention>(a, launch));
    }
    const RowKernels& rows = row_kernels(isa);
    with_team(launch.num_threads, [&](Team& team, int32_t thread) {
        const Step step{p, launch, team, rows, kernels, layout, windows, attention};
        Worker(step, thread).run();
    });
}

}  // namespace bytetx
