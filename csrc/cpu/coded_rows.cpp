// Rows of codes: checks, work over threads, and their layout in strips.
#include <cstring>
#include <stdexcept>
#include <string>

#include "coded_rows_ops.h"
#include "cpu/isa.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace bytetx {
namespace cpu {
namespace {

constexpr int64_t kWeightsOfTask = 1 << 15;  // 20 to 100 us of work

int64_t num_groups(int64_t k) { return (k + kGroupFeatures - 1) / kGroupFeatures; }

int64_t row_bytes(int64_t k, int32_t bits) {
    const int64_t group = bits == 8 ? kCodedBytes8 : kCodedBytes4;
    return num_groups(k) * group + static_cast<int64_t>(sizeof(float));
}

void check(const char* op, int64_t k, int32_t bits) {
    if (k >= 1 && (bits == 4 || bits == 8)) return;
    throw std::invalid_argument(std::string(op) + ": needs features and 4 or 8 bits, got k " +
                                std::to_string(k) + ", bits " + std::to_string(bits));
}

const GroupKernelTable& kernels_of(const char* op, const Launch& launch) {
    const GroupKernelTable* table = find_groups(resolve_isa(launch.isa));
    if (table != nullptr) return *table;
    throw std::runtime_error(std::string(op) + ": no kernel for this instruction set");
}

// Bytes of a saved block, and its features.
struct SavedBlock {
    int64_t bytes, features;
};

SavedBlock block_of(SavedFormat format, int32_t bits) {
    switch (format) {
        case SavedFormat::q4_0:
            return {18, 32};
        case SavedFormat::q4_1:
            if (bits == 4) return {20, 32};
            break;
        case SavedFormat::q4_k:
            if (bits == 4) return {144, 256};
            break;
        case SavedFormat::q5_0:
            if (bits == 8) return {22, 32};
            break;
        case SavedFormat::q8_0:
            if (bits == 8) return {34, 32};
            break;
        case SavedFormat::q6_k:
            return {210, 256};
    }
    throw std::invalid_argument("convert_rows: this format does not go into " +
                                std::to_string(bits) + " bits");
}

template <typename Row>
void each_row(int64_t n, int64_t k, const Launch& launch, Row&& one) {
    parallel_for(n, kWeightsOfTask / k + 1, launch.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) one(row);
    });
}

uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof(word));
    return word;
}

// One group of up to 16 outputs: codes of 4 features of each output, step by step, then numbers.
void stack_block8(const uint8_t* rows, int64_t stride, int64_t count, uint8_t* block) {
    for (int64_t j = 0; j < count; ++j) {
        const uint8_t* from = rows + j * stride;
        for (int64_t step = 0; step < kGroupFeatures / 4; ++step) {
            const uint32_t codes = word_at(from + 2 + 4 * step) ^ 0x80808080u;  // + 128
            std::memcpy(block + (step * kStripColumns + j) * 4, &codes, sizeof(codes));
        }
        std::memcpy(block + kGroupFeatures * kStripColumns + 2 * j, from, 2);
    }
}

void stack_block4(const uint8_t* rows, int64_t stride, int64_t count, uint8_t* block) {
    constexpr int64_t kPairs = kGroupFeatures / 8, kCodes = kGroupFeatures / 2 * kStripColumns;
    for (int64_t j = 0; j < count; ++j) {
        const uint8_t* from = rows + j * stride;
        for (int64_t pair = 0; pair < kPairs; ++pair) {
            // The low halves of 16 bytes are the group's first features, the others the last.
            const uint8_t* some = from + 4 + pair % (kPairs / 2) * 8;
            const int shift = pair < kPairs / 2 ? 0 : 4;
            const uint32_t first = word_at(some) >> shift & 0x0f0f0f0fu;
            const uint32_t second = word_at(some + 4) >> shift & 0x0f0f0f0fu;
            const uint32_t codes = first | second << 4;
            std::memcpy(block + (pair * kStripColumns + j) * 4, &codes, sizeof(codes));
        }
        std::memcpy(block + kCodes + 2 * j, from, 2);
        std::memcpy(block + kCodes + 2 * (kStripColumns + j), from + 2, 2);
    }
}

}  // namespace
}  // namespace cpu

void round_rows(const RoundRowsParams& p, const Launch& launch) {
    using namespace cpu;
    check("round_rows", p.k, p.bits);
    if (p.dtype == DType::f16) throw std::invalid_argument("round_rows: numbers are f32 or bf16");
    const GroupKernelTable& table = kernels_of("round_rows", launch);
    const bool is_f32 = p.dtype == DType::f32;
    const auto round = p.bits == 8 ? (is_f32 ? table.round8_f32 : table.round8_bf16)
                                   : (is_f32 ? table.round4_f32 : table.round4_bf16);
    const int64_t item = is_f32 ? 4 : 2, stride = row_bytes(p.k, p.bits);
    each_row(p.n, p.k, launch, [&](int64_t row) {
        round(static_cast<const char*>(p.x) + row * p.k * item, p.k,
              static_cast<uint8_t*>(p.rows) + row * stride);
    });
}

void convert_rows(const ConvertRowsParams& p, const Launch& launch) {
    using namespace cpu;
    check("convert_rows", p.k, p.bits);
    const SavedBlock block = block_of(p.format, p.bits);
    if (p.k % block.features != 0) {
        throw std::invalid_argument("convert_rows: k must be whole blocks, got " +
                                    std::to_string(p.k));
    }
    const GroupKernelTable& table = kernels_of("convert_rows", launch);
    const int64_t saved = p.k / block.features * block.bytes, stride = row_bytes(p.k, p.bits);
    each_row(p.n, p.k, launch, [&](int64_t row) {
        table.convert(static_cast<const uint8_t*>(p.blocks) + row * saved, num_groups(p.k),
                      p.format, p.bits, static_cast<uint8_t*>(p.rows) + row * stride);
    });
}

void stack_rows(const StackRowsParams& p, const Launch& launch) {
    using namespace cpu;
    check("stack_rows", p.k, p.bits);
    const int64_t groups = num_groups(p.k), stride = row_bytes(p.k, p.bits);
    const int64_t coded = p.bits == 8 ? kCodedBytes8 : kCodedBytes4;
    const int64_t block = p.bits == 8 ? kGroupBytes8 : kGroupBytes4;
    const auto stack = p.bits == 8 ? stack_block8 : stack_block4;
    const int64_t strips = (p.n + kStripColumns - 1) / kStripColumns;
    each_row(strips, p.k * kStripColumns, launch, [&](int64_t strip) {
        const int64_t first = strip * kStripColumns;
        const int64_t count = p.n - first < kStripColumns ? p.n - first : kStripColumns;
        const auto* rows = static_cast<const uint8_t*>(p.rows) + first * stride;
        auto* to = static_cast<uint8_t*>(p.strips) + strip * groups * block;
        if (count < kStripColumns) std::memset(to, 0, groups * block);
        for (int64_t group = 0; group < groups; ++group) {
            stack(rows + group * coded, stride, count, to + group * block);
        }
        for (int64_t j = 0; j < count; ++j) {
            std::memcpy(p.factor + first + j, rows + j * stride + groups * coded, sizeof(float));
        }
    });
}

}  // namespace bytetx
