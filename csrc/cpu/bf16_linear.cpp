// Linear layers of bf16 on the CPU: the loop over blocks of rows and panels of outputs.
//
// A task is a block of rows, which stays in L2, and some panels of the weight. Tasks differ with
// the number of rows and threads, their results do not: see bf16_kernel.h.
#include "cpu/bf16_linear.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace bytetx {

namespace cpu {
#if defined(BYTETX_HAS_AVX512)
namespace avx512 {
extern const Bf16Kernel kBf16Kernel;
}
#endif
#if defined(BYTETX_HAS_AVX2)
namespace avx2 {
extern const Bf16Kernel kBf16Kernel;
}
#endif
#if defined(BYTETX_HAS_NEON)
namespace neon {
extern const Bf16Kernel kBf16Kernel;
}
#endif

namespace {

constexpr int64_t kBlockWords = int64_t{64} << 10;  // words of a block's rows: half of a small L2
constexpr int64_t kTasksAThread = 4;                // so that none waits long for the last one

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t slot_words(int64_t k) { return kBf16Rows * row_words(k) + panel_words(k); }

struct NamedKernel {
    const Bf16Kernel* kernel;
    const char* name;  // the kernel's instruction set; null where there is none
};

// isa: resolved.
NamedKernel find_kernel(Isa isa) {
#if defined(BYTETX_HAS_AVX512)
    if (has(isa, Isa::avx512)) return {&avx512::kBf16Kernel, "AVX-512"};
#endif
#if defined(BYTETX_HAS_AVX2)
    if (has(isa, Isa::avx2)) return {&avx2::kBf16Kernel, "AVX2"};
#endif
#if defined(BYTETX_HAS_NEON)
    if (has(isa, Isa::neon)) return {&neon::kBf16Kernel, "NEON"};
#endif
    static_cast<void>(isa);
    return {nullptr, nullptr};
}

}  // namespace
}  // namespace cpu

const char* bf16_linear_isa() { return cpu::find_kernel(cpu::machine_isa()).name; }

int64_t bf16_linear_workspace_bytes(int64_t k, int num_threads) {
    return std::max(num_threads, 1) * cpu::slot_words(k) * int64_t{sizeof(float)};
}

void bf16_linear(const Bf16LinearParams& p, const Launch& launch) {
    using namespace cpu;
    const Bf16Kernel* kernel = find_kernel(resolve_isa(launch.isa)).kernel;
    if (kernel == nullptr) throw std::runtime_error("bf16_linear needs AVX2 or NEON");
    if (p.workspace_bytes < bf16_linear_workspace_bytes(p.k, launch.num_threads)) {
        throw std::invalid_argument("bf16_linear: the workspace is too small");
    }
    if (p.m == 0 || p.n == 0) return;
    const int64_t num_threads = std::max(launch.num_threads, 1), tile = kernel->tile_rows;
    const int64_t most_rows =
        std::clamp(kBlockWords / row_words(p.k) / tile, int64_t{1}, kBf16Rows / tile) * tile;
    // Blocks of equal size, as far as whole tiles allow it.
    const int64_t block_rows = ceil_div(ceil_div(p.m, ceil_div(p.m, most_rows)), tile) * tile;
    const int64_t num_blocks = ceil_div(p.m, block_rows);
    const int64_t num_panels = ceil_div(p.n, kBf16Columns);
    const int64_t wanted = num_threads > 1 ? ceil_div(kTasksAThread * num_threads, num_blocks) : 1;
    const int64_t splits = std::min(wanted, num_panels), num_tasks = num_blocks * splits;
    const int64_t num_slots = std::min(num_threads, num_tasks);
    std::atomic<int64_t> next{0};
    parallel_for(num_slots, 1, static_cast<int32_t>(num_slots), [&](int64_t slot, int64_t) {
        auto* rows = static_cast<float*>(p.workspace) + slot * slot_words(p.k);
        auto* panel = reinterpret_cast<uint32_t*>(rows + kBf16Rows * row_words(p.k));
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
            const int64_t begin = task / splits * block_rows, split = task % splits;
            kernel->run(p, begin, std::min(begin + block_rows, p.m), num_panels * split / splits,
                        num_panels * (split + 1) / splits, rows, panel);
        }
    });
}

}  // namespace bytetx
