// The block of an encoder's step: what a GPU reads of its texts, as int32 in one piece of memory.
#pragma once

#include <cstdint>

namespace bytetx::cpu {

// The places of the arrays in a block, in int32s, and their sizes; see bytetx/buckets.py.
struct StepBlockLayout {
    int64_t cu_seqlens;     // [num_texts + num_fillers + 1]
    int64_t prompt_tokens;  // [num_texts + num_fillers]
    int64_t input_ids;      // [total_tokens], as are the next two
    int64_t position_ids;
    int64_t token_type_ids;  // -1: the family has none
    int64_t num_texts;
    int64_t num_fillers;
    int64_t filler_tokens;
    int64_t total_tokens;
    int32_t position_offset;
};

struct StepTexts {
    const int32_t* input_ids;
    const int32_t* seqlens;
    const int32_t* token_type_ids;  // null: 0 everywhere
    const int32_t* prompt_tokens;   // null: 0 everywhere
    int64_t total_tokens;
    int64_t batch_size;
};

// Fills all of a block. What is behind the texts' own tokens is zeros.
void write_step_block(const StepBlockLayout& layout, const StepTexts& texts, int32_t* block);

}  // namespace bytetx::cpu
