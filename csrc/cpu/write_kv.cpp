// This step's keys and values into their slots of the cache, on the CPU: two copies a token.
//
// Bound by: memory.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cache_ops.h"
#include "cpu/parallel.h"

namespace bytetx {
namespace {

constexpr int64_t kBytesPerPiece = 1 << 17;  // about 10 us of copying

}  // namespace

void write_kv(const WriteKvParams& p, const Launch& launch) {
    for (int64_t i = 0; i < p.total_tokens; ++i) {
        if (p.slot_mapping[i] >= -1 && p.slot_mapping[i] < p.num_slots) continue;
        throw std::invalid_argument("slot_mapping must be in [-1, " + std::to_string(p.num_slots) +
                                    "), the slots of the cache, got " +
                                    std::to_string(p.slot_mapping[i]) + " at " + std::to_string(i));
    }
    const int64_t element = p.dtype == DType::f32 ? 4 : 2;
    const int64_t width = p.row_elements * element;
    if (width == 0) return;
    const int64_t grain = kBytesPerPiece / (2 * width) + 1;
    cpu::parallel_for(p.total_tokens, grain, launch.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t slot = p.slot_mapping[i];
            if (slot < 0) continue;
            std::memcpy(static_cast<char*>(p.k_cache) + slot * width,
                        static_cast<const char*>(p.k) + i * p.k_stride * element, width);
            std::memcpy(static_cast<char*>(p.v_cache) + slot * width,
                        static_cast<const char*>(p.v) + i * p.v_stride * element, width);
        }
    });
}

}  // namespace bytetx
