// Products with weights in panels, for few rows, and gates: checks, and work over threads.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace bytetx {

namespace cpu {

#if defined(BYTETX_HAS_AVX512BF16)
namespace avx512_bf16 {
extern const PanelKernelTable kPanelKernels;
}
#endif
#if defined(BYTETX_HAS_AVX512)
namespace avx512 {
extern const PanelKernelTable kPanelKernels;
extern const GroupKernelTable kGroupKernels;
}  // namespace avx512
#endif
#if defined(BYTETX_HAS_AVX2)
namespace avx2 {
extern const PanelKernelTable kPanelKernels;
extern const GroupKernelTable kGroupKernels;
}  // namespace avx2
#endif

#if defined(BYTETX_HAS_AVX512VNNI)
namespace avx512_vnni {
extern const GroupKernelTable kGroupKernels;
}
#endif
#if defined(BYTETX_HAS_NEONBF16)
namespace neon_bf16 {
extern const PanelKernelTable kPanelKernels;
}
#endif
#if defined(BYTETX_HAS_NEON)
namespace neon {
extern const PanelKernelTable kPanelKernels;
extern const GroupKernelTable kGroupKernels;
}  // namespace neon
#endif

namespace {

constexpr int64_t kGatesPerPiece = 1 << 13;   // 5 to 10 us of work
constexpr int64_t kStagedFeatures = 1 << 15;  // 5 to 20 us of work

struct NamedTable {
    const PanelKernelTable* table;
    const char* name;
};

NamedTable find_table(Isa isa) {
#if defined(BYTETX_HAS_AVX512BF16)
    if (has(isa, Isa::avx512_bf16)) return {&avx512_bf16::kPanelKernels, "AVX-512 bf16"};
#endif
#if defined(BYTETX_HAS_AVX512)
    if (has(isa, Isa::avx512)) return {&avx512::kPanelKernels, "AVX-512"};
#endif
#if defined(BYTETX_HAS_AVX2)
    if (has(isa, Isa::avx2)) return {&avx2::kPanelKernels, "AVX2"};
#endif
#if defined(BYTETX_HAS_NEONBF16)
    if (has(isa, Isa::neon_bf16)) return {&neon_bf16::kPanelKernels, "NEON bf16"};
#endif
#if defined(BYTETX_HAS_NEON)
    if (has(isa, Isa::neon)) return {&neon::kPanelKernels, "NEON"};
#endif
    static_cast<void>(isa);
    return {nullptr, nullptr};
}

}  // namespace

const GroupKernelTable* find_groups(Isa isa) {
#if defined(BYTETX_HAS_AVX512VNNI)
    if (has(isa, Isa::avx512_vnni)) return &avx512_vnni::kGroupKernels;
#endif
#if defined(BYTETX_HAS_AVX512)
    if (has(isa, Isa::avx512)) return &avx512::kGroupKernels;
#endif
#if defined(BYTETX_HAS_AVX2)
    if (has(isa, Isa::avx2)) return &avx2::kGroupKernels;
#endif
#if defined(BYTETX_HAS_NEON)
    if (has(isa, Isa::neon)) return &neon::kGroupKernels;
#endif
    static_cast<void>(isa);
    return nullptr;
}

PanelKernels panel_kernels(Isa isa, DType dtype, PanelFormat format) {
    if (dtype == DType::f16) return {};
    const bool is_f32 = dtype == DType::f32;
    if (has_codes(format)) {
        const GroupKernelTable* table = find_groups(isa);
        if (table == nullptr) return {};
        if (format == PanelFormat::int8) return is_f32 ? table->int8_f32 : table->int8_bf16;
        return is_f32 ? table->int4_f32 : table->int4_bf16;
    }
    const PanelKernelTable* table = find_table(isa).table;
    if (table == nullptr) return {};
    if (is_f32) return table->f32;
    return format == PanelFormat::bf16_dot ? table->bf16_dot : table->bf16;
}

int64_t strips_of_task(const PanelMatrix& w, int num_threads) {
    constexpr int64_t kTasksAThread = 4;  // so that none waits long for the last one
    const int64_t tasks = kTasksAThread * std::max(num_threads, 1),
                  panel = std::max(w.columns / kStripColumns, int64_t{1});
    const int64_t strips = std::max(num_strips(w) / tasks, int64_t{1});
    return strips > panel ? strips / panel * panel : strips;
}

void check_panels(const char* op, const PanelMatrix& w, DType dtype) {
    bool fits = w.n >= 1 && w.k >= 1 && w.features >= w.k;
    if (has_codes(w.format)) {
        fits = fits && w.features == panel_row_words(w.k) && w.columns == kStripColumns &&
               w.factor != nullptr;
    } else {
        const bool is_even = dtype == DType::f32 || (w.features % 2 == 0 && w.chain % 2 == 0);
        const bool is_panel = w.columns >= kStripColumns && w.columns % kStripColumns == 0;
        const bool is_plain = has_plain_rows(w) && dtype == DType::f32;
        fits = fits && (is_panel || is_plain) && w.chain >= 1 && is_even;
    }
    if (fits) return;
    throw std::invalid_argument(std::string(op) + ": not a matrix in panels, n " +
                                std::to_string(w.n) + ", k " + std::to_string(w.k) + ", features " +
                                std::to_string(w.features) + ", columns " +
                                std::to_string(w.columns) + ", chain " + std::to_string(w.chain));
}

}  // namespace cpu

const char* panel_linear_isa() { return cpu::find_table(cpu::machine_isa()).name; }

int64_t panel_linear_workspace_bytes(int64_t m, int64_t k) {
    return m * cpu::most_row_words(k) * int64_t{sizeof(float)};
}

void panel_linear(const PanelLinearParams& p, const Launch& launch) {
    using namespace cpu;
    check_panels("panel_linear", p.w, p.dtype);
    const PanelKernels kernels = panel_kernels(resolve_isa(launch.isa), p.dtype, p.w.format);
    if (kernels.multiply == nullptr) {
        throw std::runtime_error("panel_linear: no kernel for this dtype and instruction set");
    }
    if (p.workspace_bytes < panel_linear_workspace_bytes(p.m, p.w.k)) {
        throw std::invalid_argument("panel_linear: the workspace is too small");
    }
    if (p.m == 0) return;
    auto* rows = static_cast<float*>(p.workspace);
    const int64_t item = p.dtype == DType::f32 ? 4 : 2,
                  row_words = panel_row_words(p.w.k, p.w.format);
    parallel_for(p.m, kStagedFeatures / p.w.k + 1, launch.num_threads,
                 [&](int64_t begin, int64_t end) {
                     const auto* x = static_cast<const char*>(p.x) + begin * p.w.k * item;
                     kernels.stage(x, end - begin, p.w.k, rows + begin * row_words);
                 });
    const PanelProduct product{p.w, rows, p.d, p.m, p.activation};
    parallel_for(num_strips(p.w), strips_of_task(p.w, launch.num_threads), launch.num_threads,
                 [&](int64_t begin, int64_t end) { kernels.multiply(product, begin, end); });
}

void gate_blocks(const GateBlocksParams& p, const Launch& launch) {
    using namespace cpu;
    const auto gate = panel_kernels(resolve_isa(launch.isa), p.dtype, PanelFormat::words).gate;
    if (gate == nullptr) {
        throw std::runtime_error("gate_blocks: no kernel for this dtype and instruction set");
    }
    if (p.block < 1 || p.n % p.block != 0) {
        throw std::invalid_argument("gate_blocks: n must be whole blocks");
    }
    const int64_t grain = kGatesPerPiece / std::max(p.n, int64_t{1}) + 1;
    parallel_for(p.m, grain, launch.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) gate(p, row, 0, p.n);
    });
}

}  // namespace bytetx
