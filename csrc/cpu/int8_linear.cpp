// Linear layers of 8-bit integers on the CPU: the loop over blocks of rows and panels of outputs.
//
// A thread takes a block of rows, rounds it to 8 bits and multiplies it with all panels of the
// weight, which come from L2 or L3; for few rows, several threads share the panels of a block, and
// each rounds the rows again. See int8_kernel.h for the kernel.
#include "cpu/int8_linear.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace bytetx {

namespace cpu {
#if defined(BYTETX_HAS_AMXINT8)
namespace amx_int8 {
extern const Int8Kernel kInt8Kernel;
}
#endif
#if defined(BYTETX_HAS_AVX512VNNI)
namespace avx512_vnni {
extern const Int8Kernel kInt8Kernel;
}
#endif
#if defined(BYTETX_HAS_AVX2)
namespace avx2 {
extern const Int8Kernel kInt8Kernel;
}
#endif
#if defined(BYTETX_HAS_NEONI8MM)
namespace neon_i8mm {
extern const Int8Kernel kInt8Kernel;
}
#endif
#if defined(BYTETX_HAS_NEONDOTPROD)
namespace neon_dotprod {
extern const Int8Kernel kInt8Kernel;
}
#endif
#if defined(BYTETX_HAS_NEON)
namespace neon {
extern const Int8Kernel kInt8Kernel;
}
#endif

namespace {

constexpr int64_t kCacheLine = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of a thread's rounded rows, whole cache lines, and of what is known of each.
int64_t rows_offset(int64_t k) { return ceil_div(rounded_bytes(k), kCacheLine) * kCacheLine; }

int64_t slot_bytes(int64_t k) {
    const int64_t most_rows = std::max(kInt8Rows, kMostStagedRows);
    return rows_offset(k) + most_rows * int64_t{sizeof(QuantizedRow)};
}

struct NamedKernel {
    const Int8Kernel* kernel;
    const char* name;  // the kernel's instruction set; null where there is none
};

// isa: resolved. AVX-512 without VNNI takes AVX2's kernel.
NamedKernel find_kernel(Isa isa) {
#if defined(BYTETX_HAS_AMXINT8)
    if (has(isa, Isa::amx_int8)) return {&amx_int8::kInt8Kernel, "AMX int8"};
#endif
#if defined(BYTETX_HAS_AVX512VNNI)
    if (has(isa, Isa::avx512_vnni)) return {&avx512_vnni::kInt8Kernel, "AVX-512 VNNI"};
#endif
#if defined(BYTETX_HAS_AVX2)
    if (has(isa, Isa::avx2)) return {&avx2::kInt8Kernel, "AVX2"};
#endif
#if defined(BYTETX_HAS_NEONI8MM)
    if (has(isa, Isa::neon_i8mm)) return {&neon_i8mm::kInt8Kernel, "NEON i8mm"};
#endif
#if defined(BYTETX_HAS_NEONDOTPROD)
    if (has(isa, Isa::neon_dotprod)) return {&neon_dotprod::kInt8Kernel, "NEON dot product"};
#endif
#if defined(BYTETX_HAS_NEON)
    if (has(isa, Isa::neon)) return {&neon::kInt8Kernel, "NEON"};
#endif
    static_cast<void>(isa);
    return {nullptr, nullptr};
}

void check(const Int8LinearParams& p, const Launch& launch) {
    if (p.dtype != DType::f32 && p.dtype != DType::bf16) {
        throw std::invalid_argument("int8_linear: dtype must be f32 or bf16");
    }
    // A product of 8 bits is below 2^15, and the sum of k of them must fit 32 bits.
    if (p.k < 1 || p.k > int64_t{1} << 16) {
        throw std::invalid_argument("int8_linear: k must be 1 to 65536, got " +
                                    std::to_string(p.k));
    }
    if (p.workspace_bytes < int8_linear_workspace_bytes(p.m, p.k, launch.num_threads)) {
        throw std::invalid_argument("int8_linear: the workspace is too small");
    }
}

}  // namespace
}  // namespace cpu

const char* int8_linear_isa() { return cpu::find_kernel(cpu::machine_isa()).name; }

int64_t int8_linear_workspace_bytes(int64_t, int64_t k, int num_threads) {
    return std::max(num_threads, 1) * cpu::slot_bytes(k);
}

void int8_linear(const Int8LinearParams& p, const Launch& launch) {
    using namespace cpu;
    const Int8Kernel* kernel = find_kernel(resolve_isa(launch.isa)).kernel;
    if (kernel == nullptr) throw std::runtime_error("int8_linear needs AVX2 or NEON");
    check(p, launch);
    if (p.m == 0 || p.n == 0) return;
    const int64_t num_threads = std::max(launch.num_threads, 1);
    // Blocks that all threads get the same number of, as far as whole tiles allow it.
    const int64_t tiles = ceil_div(ceil_div(p.m, num_threads), kernel->tile_rows);
    const int64_t share = tiles * kernel->tile_rows;
    const int64_t block_rows = std::min(share, kernel->block_rows(p.k));
    const int64_t num_blocks = ceil_div(p.m, block_rows);
    const int64_t num_panels = ceil_div(p.n, kInt8Columns);
    const int64_t splits = std::clamp(num_threads / num_blocks, int64_t{1}, num_panels);
    const int64_t num_tasks = num_blocks * splits;
    const int64_t num_slots = std::min(num_threads, num_tasks);
    std::atomic<int64_t> next{0};
    parallel_for(num_slots, 1, static_cast<int32_t>(num_slots), [&](int64_t slot, int64_t) {
        auto* q = static_cast<std::byte*>(p.workspace) + slot * slot_bytes(p.k);
        auto* rows = reinterpret_cast<QuantizedRow*>(q + rows_offset(p.k));
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
            const int64_t begin = task / splits * block_rows, split = task % splits;
            kernel->run(p, begin, std::min(begin + block_rows, p.m), num_panels * split / splits,
                        num_panels * (split + 1) / splits, q, rows);
        }
    });
}

}  // namespace bytetx
