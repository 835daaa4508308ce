// One pass over the texts, where numpy needs a dozen calls of a microsecond each: a text alone
// waits for them before its graph is launched.

#include "cpu/step_block.h"

#include <algorithm>
#include <cstring>

namespace bytetx::cpu {
namespace {

void copy_or_zero(int32_t* out, const int32_t* values, int64_t count, int64_t size) {
    if (values == nullptr) count = 0;
    if (count > 0) std::memcpy(out, values, count * sizeof(int32_t));
    std::fill(out + count, out + size, 0);
}

// Positions count from the offset; pad tokens, whose id is below it, are not counted.
void write_positions(const StepTexts& texts, int32_t offset, int32_t* out) {
    const int32_t* ids = texts.input_ids;
    for (int64_t text = 0; text < texts.batch_size; ++text) {
        const int32_t seqlen = texts.seqlens[text];
        int32_t next = offset;
        for (int32_t i = 0; i < seqlen; ++i) {
            const bool is_pad = offset > 0 && ids[i] == offset - 1;
            out[i] = is_pad ? offset - 1 : next;
            next += !is_pad;
        }
        ids += seqlen;
        out += seqlen;
    }
}

}  // namespace

void write_step_block(const StepBlockLayout& layout, const StepTexts& texts, int32_t* block) {
    const int64_t batch_size = layout.num_texts + layout.num_fillers;
    int32_t* cu_seqlens = block + layout.cu_seqlens;
    int32_t end = 0;
    *cu_seqlens++ = 0;
    for (int64_t text = 0; text < texts.batch_size; ++text)
        *cu_seqlens++ = end += texts.seqlens[text];
    for (int64_t text = texts.batch_size; text < layout.num_texts; ++text) *cu_seqlens++ = end;
    for (int64_t filler = 0; filler < layout.num_fillers; ++filler) {
        const int64_t filled = texts.total_tokens + (filler + 1) * layout.filler_tokens;
        *cu_seqlens++ = static_cast<int32_t>(std::min(filled, layout.total_tokens));
    }
    copy_or_zero(block + layout.prompt_tokens, texts.prompt_tokens, texts.batch_size, batch_size);
    copy_or_zero(block + layout.input_ids, texts.input_ids, texts.total_tokens,
                 layout.total_tokens);
    int32_t* positions = block + layout.position_ids;
    write_positions(texts, layout.position_offset, positions);
    std::fill(positions + texts.total_tokens, positions + layout.total_tokens, 0);
    if (layout.token_type_ids >= 0) {
        copy_or_zero(block + layout.token_type_ids, texts.token_type_ids, texts.total_tokens,
                     layout.total_tokens);
    }
}

}  // namespace bytetx::cpu
