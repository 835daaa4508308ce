// Rotary position embedding in place, on the CPU: two products and a sum a feature, in f32.
//
// Bound by: memory, and in bf16 conversion.  Compiled for any processor: the rows of a decode step
// are few, and those of a prompt cost little beside its products.
#include "cpu/rotary.h"

#include <stdexcept>
#include <string>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace bytetx {
namespace {

using cpu::BYTETX_SIMD::Bf16;
using cpu::BYTETX_SIMD::to_bf16;
using cpu::BYTETX_SIMD::to_float;

constexpr int64_t kElementsPerPiece = 1 << 14;  // 5 to 10 us of work

inline void store(float* p, float x) { *p = x; }
inline void store(Bf16* p, float x) { *p = to_bf16(x); }

// Pairs (x[i * step], x[i * step + gap]) of one head.
template <int kStep, typename T>
void turn_head(T* x, int gap, const float* cos, const float* sin, int num_pairs) {
#pragma GCC ivdep
    for (int i = 0; i < num_pairs; ++i) {
        const float a = to_float(x[i * kStep]), b = to_float(x[i * kStep + gap]);
        store(x + i * kStep, a * cos[i] - b * sin[i]);
        store(x + i * kStep + gap, b * cos[i] + a * sin[i]);
    }
}

template <typename T>
void turn_rows_of(const RotaryParams& p, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const int64_t angle = int64_t{p.position_ids[row]} * p.num_pairs;
        T* x = static_cast<T*>(p.x) + row * p.x_stride;
        for (int head = 0; head < p.num_heads; ++head, x += p.head_dim) {
            if (p.is_interleaved) {
                turn_head<2>(x, 1, p.cos + angle, p.sin + angle, p.num_pairs);
            } else {
                turn_head<1>(x, p.num_pairs, p.cos + angle, p.sin + angle, p.num_pairs);
            }
        }
    }
}

}  // namespace

namespace cpu {

void check_rotary(const RotaryParams& p) {
    if (p.dtype != DType::f32 && p.dtype != DType::bf16) {
        throw std::invalid_argument("rotary: dtype must be f32 or bf16");
    }
    if (2 * p.num_pairs > p.head_dim) {
        throw std::invalid_argument("rotary: head_dim must be at least 2 * num_pairs, got " +
                                    std::to_string(p.head_dim));
    }
    for (int64_t i = 0; i < p.total_tokens; ++i) {
        if (p.position_ids[i] >= 0 && p.position_ids[i] < p.num_positions) continue;
        throw std::invalid_argument("position_ids must be in [0, " +
                                    std::to_string(p.num_positions) +
                                    "), the rows of cos and sin, got " +
                                    std::to_string(p.position_ids[i]) + " at " + std::to_string(i));
    }
}

void turn_rows(const RotaryParams& p, int64_t begin, int64_t end) {
    p.dtype == DType::f32 ? turn_rows_of<float>(p, begin, end) : turn_rows_of<Bf16>(p, begin, end);
}

}  // namespace cpu

void rotary(const RotaryParams& p, const Launch& launch) {
    cpu::check_rotary(p);
    const int64_t row = int64_t{p.num_heads} * p.num_pairs * 2;
    if (row == 0) return;
    const int64_t grain = kElementsPerPiece / row + 1;
    cpu::parallel_for(p.total_tokens, grain, launch.num_threads,
                      [&](int64_t begin, int64_t end) { cpu::turn_rows(p, begin, end); });
}

}  // namespace bytetx
