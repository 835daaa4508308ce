#include "cpu/rows.h"

#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/rows_kernels.h"

namespace bytetx::cpu {

namespace portable {
const RowKernels kRowKernels = make_row_kernels();
}
#if defined(__x86_64__)
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}
namespace avx512_bf16 {
extern const RowKernels kRowKernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const RowKernels kRowKernels;
}
namespace neon_bf16 {
extern const RowKernels kRowKernels;
}
#endif

const RowKernels& row_kernels(Isa isa) {
    const Isa set = resolve_isa(isa);
#if defined(__x86_64__)
    if (has(set, Isa::avx512_bf16)) return avx512_bf16::kRowKernels;
    if (has(set, Isa::avx512)) return avx512::kRowKernels;
    if (has(set, Isa::avx2)) return avx2::kRowKernels;
#elif defined(__aarch64__)
    if (has(set, Isa::neon_bf16)) return neon_bf16::kRowKernels;
    if (has(set, Isa::neon)) return neon::kRowKernels;
#endif
    static_cast<void>(set);
    return portable::kRowKernels;
}

void check_rows(const char* op, DType dtype, int64_t hidden_size) {
    if (dtype != DType::f32 && dtype != DType::bf16) {
        throw std::invalid_argument(std::string(op) + ": dtype must be f32 or bf16 on a CPU");
    }
    if (hidden_size < 1 || hidden_size > kMaxRowWidth) {
        throw std::invalid_argument(std::string(op) + ": hidden_size must be 1 to " +
                                    std::to_string(kMaxRowWidth) + ", got " +
                                    std::to_string(hidden_size));
    }
}

int64_t rows_per_piece(int64_t hidden_size) {
    // 16 Ki elements take some 2 us, as long as waking a thread that still spins.
    constexpr int64_t kElements = 16384;
    return hidden_size < kElements ? kElements / hidden_size : 1;
}

}  // namespace bytetx::cpu
