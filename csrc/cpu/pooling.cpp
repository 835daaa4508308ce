#include <stdexcept>
#include <string>

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bytetx {
namespace {

constexpr int64_t kColumns = 256;  // a column block's share of a row: 512 bytes at least, in bf16

// The kernels trust the lengths, so a batch whose lengths do not fit x must not reach them.
void check_lengths(const PoolParams& p) {
    for (int64_t i = 0; i < p.batch_size; ++i) {
        const bool is_bad = p.cu_seqlens[i + 1] < p.cu_seqlens[i] ||
                            (p.first_tokens != nullptr && p.first_tokens[i] < 0);
        if (is_bad) {
            throw std::invalid_argument(
                "cu_seqlens must not decrease and first_tokens must not be negative, got "
                "cu_seqlens " +
                std::to_string(p.cu_seqlens[i]) + ", " + std::to_string(p.cu_seqlens[i + 1]) +
                " for sequence " + std::to_string(i));
        }
    }
    if (p.cu_seqlens[0] != 0 || p.cu_seqlens[p.batch_size] != p.total_tokens) {
        throw std::invalid_argument("cu_seqlens must run from 0 to total_tokens " +
                                    std::to_string(p.total_tokens) + ", got " +
                                    std::to_string(p.cu_seqlens[0]) + " to " +
                                    std::to_string(p.cu_seqlens[p.batch_size]));
    }
}

}  // namespace

int64_t pool_workspace_bytes(int64_t, int64_t, int64_t) { return 0; }

void pool(const PoolParams& p, const Launch& launch) {
    if (p.batch_size == 0) return;
    cpu::check_rows("pool", p.dtype, p.hidden_size);
    check_lengths(p);
    const cpu::RowKernels& kernels = cpu::row_kernels(launch.isa);
    // One task a sequence and block of columns: a single long sequence still feeds every thread.
    const int64_t num_blocks = (p.hidden_size + kColumns - 1) / kColumns;
    const bool is_wide = p.batch_size >= 4 * launch.num_threads;
    const int64_t columns = is_wide ? p.hidden_size : kColumns;
    const int64_t num_tasks = is_wide ? p.batch_size : p.batch_size * num_blocks;
    const bool is_small = p.total_tokens * p.hidden_size < 65536;
    const int num_threads = is_small ? 1 : launch.num_threads;
    cpu::parallel_for(num_tasks, 1, num_threads, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; ++task) {
            const int64_t sequence = is_wide ? task : task / num_blocks;
            const int64_t begin = is_wide ? 0 : task % num_blocks * columns;
            const int64_t end = begin + columns < p.hidden_size ? begin + columns : p.hidden_size;
            kernels.pool(p, sequence, begin, end);
        }
    });
    if (!p.normalize) return;
    for (int64_t i = 0; i < p.batch_size; ++i) {
        kernels.normalize(p.out + i * p.hidden_size, p.hidden_size);
    }
}

}  // namespace bytetx
