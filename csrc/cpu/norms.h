// Shared by layer_norm and rms_norm on a CPU: checks, and rows over threads.
#pragma once

#include <stdexcept>
#include <string>

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bytetx::cpu {

inline void run_norm(const char* op, const NormParams& p, const Launch& launch,
                     void (*rows)(const NormParams& p, int64_t begin, int64_t end)) {
    if (p.total_tokens == 0) return;
    check_rows(op, p.dtype, p.hidden_size);
    if (p.out_fp8 != nullptr) {
        throw std::invalid_argument(std::string(op) + ": no E4M3 rows on a CPU");
    }
    parallel_for(p.total_tokens, rows_per_piece(p.hidden_size), launch.num_threads,
                 [&](int64_t begin, int64_t end) { rows(p, begin, end); });
}

}  // namespace bytetx::cpu
