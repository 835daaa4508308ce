#include "text_ring.h"

#include <stdexcept>
#include <string>

namespace bytetx::cpu {

TextRing::TextRing(uint8_t* memory, const TextRingSizes& sizes)
    : sizes_(sizes),
      header_(reinterpret_cast<TextRingHeader*>(memory)),
      submitted_(reinterpret_cast<int32_t*>(memory + sizes.submitted())),
      done_(reinterpret_cast<int32_t*>(memory + sizes.done())),
      facts_(reinterpret_cast<SlotFacts*>(memory + sizes.facts())),
      token_ids_(reinterpret_cast<int32_t*>(memory + sizes.token_ids())),
      vectors_(reinterpret_cast<float*>(memory + sizes.vectors())) {}

bool TextRing::submit(const int32_t* entries, int64_t count) {
    const int64_t before = header_->num_submitted.load(std::memory_order_relaxed);
    for (int64_t i = 0; i < count; ++i) {
        submitted_[(before + i) % sizes_.num_entries()] = entries[i];
    }
    // Pairs with the load in num_new_entries(); sequentially consistent, as is the exchange: either
    // start_waiting() sees the entries, or this sees that the engine waits.
    header_->num_submitted.store(before + count, std::memory_order_seq_cst);
    return header_->engine_waits.exchange(0, std::memory_order_seq_cst) != 0;
}

int64_t TextRing::num_newly_done() {
    // Pairs with finish(), as submit() does with start_waiting(): either this sees its slots, or it
    // sees that the front-end is to be woken.
    header_->front_end_is_woken.store(0, std::memory_order_seq_cst);
    const int64_t count = header_->num_done.load(std::memory_order_seq_cst) - num_read_;
    if (count < 0 || count > sizes_.num_slots) {
        throw std::runtime_error("the ring's counter of done texts is damaged");
    }
    return count;
}

void TextRing::take_done(int32_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) slots[i] = done_[(num_read_ + i) % sizes_.num_slots];
    num_read_ += count;
}

bool TextRing::has_entries() const {
    return header_->num_submitted.load(std::memory_order_acquire) != num_taken_;
}

bool TextRing::start_waiting() {
    header_->engine_waits.store(1, std::memory_order_seq_cst);
    // Pairs with the store and the exchange in submit().
    return header_->num_submitted.load(std::memory_order_seq_cst) == num_taken_;
}

void TextRing::stop_waiting() { header_->engine_waits.store(0, std::memory_order_relaxed); }

int64_t TextRing::num_new_entries() const {
    const int64_t count = header_->num_submitted.load(std::memory_order_acquire) - num_taken_;
    if (count < 0 || count > sizes_.num_entries()) {
        throw std::runtime_error("the ring's counter of submitted texts is damaged");
    }
    return count;
}

void TextRing::take_entries(int32_t* entries, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        entries[i] = submitted_[(num_taken_ + i) % sizes_.num_entries()];
    }
    num_taken_ += count;
}

int32_t TextRing::seqlen(int32_t slot) const {
    if (slot < 0 || slot >= sizes_.num_slots) {
        throw std::runtime_error("the ring names slot " + std::to_string(slot));
    }
    const int32_t length = facts_[slot].seqlen;
    if (length < 0 || length > sizes_.max_tokens) {
        throw std::runtime_error("a slot of the ring has " + std::to_string(length) + " tokens");
    }
    return length;
}

bool TextRing::finish(const int32_t* slots, int64_t count) {
    const int64_t before = header_->num_done.load(std::memory_order_relaxed);
    for (int64_t i = 0; i < count; ++i) done_[(before + i) % sizes_.num_slots] = slots[i];
    header_->num_done.store(before + count, std::memory_order_seq_cst);
    return header_->front_end_is_woken.exchange(1, std::memory_order_seq_cst) == 0;
}

}  // namespace bytetx::cpu
