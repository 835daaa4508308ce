// A ring of texts in memory that two processes share: a front-end submits token ids, the engine's
// process takes them and gives a vector for each.
//
// Each text has a slot, which is the front-end's until its number stands in the queue of what was
// submitted, the engine's until it stands in the queue of what is done, and then the front-end's
// again. Each queue has one writer, which publishes its entries by raising a counter that never
// falls; positions in a queue are counters modulo its capacity. Nothing here waits or allocates.
// Each side says when the other is to be woken: once for all that it has not read yet.
//
//   header | submitted entries | done entries | SlotFacts | token ids | vectors
#pragma once

#include <atomic>
#include <cstdint>

namespace bytetx::cpu {

// One text. A front-end sets all but the seconds before it submits the slot.
struct SlotFacts {
    int32_t kind;           // the engine's number of the call's options
    int32_t group;          // 0: of a small call; else a number that the texts of a call share
    int32_t seqlen;         // tokens
    int32_t prompt_tokens;  // at the start
    int32_t is_truncated;
    int32_t state;        // 0: the result is a vector, 1: there is none
    float queue_seconds;  // the mean of the text's step
    float compute_seconds;
};

struct TextRingSizes {
    int64_t num_slots;
    int64_t max_tokens;  // in a text
    int64_t width;       // numbers of the longest vector

    // A slot can be submitted and cancelled before the engine has read either.
    int64_t num_entries() const { return 2 * num_slots; }
    int64_t submitted() const { return kHeaderBytes; }
    int64_t done() const { return submitted() + num_entries() * 4; }
    int64_t facts() const { return done() + num_slots * 4; }
    int64_t token_ids() const { return facts() + num_slots * int64_t{sizeof(SlotFacts)}; }
    int64_t vectors() const { return token_ids() + num_slots * max_tokens * 4; }
    int64_t num_bytes() const { return vectors() + num_slots * width * 4; }

    static constexpr int64_t kHeaderBytes = 256;
};

// The front of the memory. Each counter has a cache line of its own, which one process writes.
struct TextRingHeader {
    alignas(64) std::atomic<int64_t> num_submitted;
    alignas(64) std::atomic<int64_t> num_done;
    alignas(64) std::atomic<int32_t> engine_waits;
    alignas(64) std::atomic<int32_t> front_end_is_woken;  // and has not read what is done since
};
static_assert(sizeof(TextRingHeader) <= TextRingSizes::kHeaderBytes);
static_assert(std::atomic<int64_t>::is_always_lock_free);  // else they were not shared

// One end of a ring; an object is of one process, and one thread at a time uses it.
class TextRing {
  public:
    // memory: of num_bytes() zeros at first.
    TextRing(uint8_t* memory, const TextRingSizes& sizes);

    // For the front-end.

    // Publishes slots; of a number below 0, ~number is a slot whose group is cancelled. There are
    // at most num_entries() that the engine has not taken. Returns whether the engine waits and is
    // to be woken.
    bool submit(const int32_t* entries, int64_t count);
    // How many slots are done since the last call, at most num_slots; it is woken for later ones.
    int64_t num_newly_done();
    // Copies so many of them.
    void take_done(int32_t* slots, int64_t count);

    // For the engine's process.

    bool has_entries() const;
    // Says that the engine waits. False where entries have come meanwhile, and it must not.
    bool start_waiting();
    void stop_waiting();
    // How many entries were submitted since the last call. Throws where the memory is damaged.
    int64_t num_new_entries() const;
    // Copies so many of them.
    void take_entries(int32_t* entries, int64_t count);
    // The tokens of a slot. Throws for a slot that there is not, and a length that none may have.
    int32_t seqlen(int32_t slot) const;
    SlotFacts& facts(int32_t slot) { return facts_[slot]; }
    const int32_t* token_ids(int32_t slot) const { return token_ids_ + slot * sizes_.max_tokens; }
    float* vector(int32_t slot) { return vectors_ + slot * sizes_.width; }
    // Gives slots back with their results. Returns whether the front-end is to be woken.
    bool finish(const int32_t* slots, int64_t count);

  private:
    TextRingSizes sizes_;
    TextRingHeader* header_;
    int32_t* submitted_;
    int32_t* done_;
    SlotFacts* facts_;
    int32_t* token_ids_;
    float* vectors_;
    int64_t num_taken_ = 0;  // entries that the engine took
    int64_t num_read_ = 0;   // done slots that the front-end took
};

}  // namespace bytetx::cpu
