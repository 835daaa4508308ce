#include <stdexcept>
#include <string>

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bytetx {
namespace {

// The first pass only asks whether any id is bad: one unsigned comparison finds negative ids too,
// and without an early exit the compiler makes it a vector loop.
void check_ids(const char* name, const int32_t* ids, int64_t count, int64_t table_size) {
    const uint64_t limit = static_cast<uint64_t>(table_size);
    const uint32_t size = limit > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(limit);
    uint32_t num_bad = 0;
    for (int64_t i = 0; i < count; ++i) num_bad |= static_cast<uint32_t>(ids[i]) >= size;
    if (num_bad == 0) return;
    int64_t i = 0;
    while (static_cast<uint32_t>(ids[i]) < size) ++i;
    throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " +
                                std::to_string(ids[i]) + ", but the table has " +
                                std::to_string(table_size) + " rows (ids 0 to " +
                                std::to_string(table_size - 1) + ")");
}

}  // namespace

void embed(const EmbedParams& p, const Launch& launch) {
    if (p.total_tokens == 0) return;
    cpu::check_rows("embed", p.dtype, p.hidden_size);
    if (p.inputs_embeds == nullptr) {
        check_ids("input_ids", p.input_ids, p.total_tokens, p.num_words);
    }
    if (p.position != nullptr) {
        check_ids("position_ids", p.position_ids, p.total_tokens, p.num_positions);
    }
    if (p.token_type != nullptr) {
        check_ids("token_type_ids", p.token_type_ids, p.total_tokens, p.num_token_types);
    }
    const cpu::RowKernels& kernels = cpu::row_kernels(launch.isa);
    cpu::parallel_for(p.total_tokens, cpu::rows_per_piece(p.hidden_size), launch.num_threads,
                      [&](int64_t begin, int64_t end) { kernels.embed(p, begin, end); });
}

}  // namespace bytetx
