// WordPiece: strings to token ids without Python, on as many threads as are given.
//
// A tokenizer of the BERT kind maps each character by itself (to nothing, to a border of words, to
// a word of its own, to other characters), and cuts each word greedily into the longest pieces of
// its vocabulary (Wu et al., arXiv 1609.08144, section 4.1). Characters are not known here: the
// caller learns each one from the reference tokenizer when it first occurs, and says it by learn().
// So what this class gives is by construction what the reference gives, which a test holds.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace bytetx::cpu {

// A string as Python holds it: `length` characters of 1, 2 or 4 bytes.
struct TextView {
    const void* data;
    int64_t length;
    int bytes_per_char;
};

// What became of a text. Only the first two have tokens.
enum class TextStatus : int8_t {
    whole = 0,
    cut = 1,      // it has more than max_tokens; its first ones are there
    foreign = 2,  // it needs the reference tokenizer
    unknown = 3,  // a character of it is to be learnt first
};

// What a character does; the values are learn()'s.
enum class CharKind : uint32_t { letter = 0, border = 1, mark = 2, foreign = 3 };

struct CharPart {
    CharKind kind;
    uint32_t code_point;  // of a letter, or of a mark: a word of one character
};

using CharParts = std::vector<CharPart>;
using VocabEntry = std::pair<std::string, int32_t>;

struct WordPieceConfig {
    std::vector<VocabEntry> vocab;  // continuing pieces with their prefix
    std::string continuing_prefix;
    int32_t unk_id;
    int64_t max_word_chars;                    // a longer word is unknown as a whole
    std::vector<int32_t> head, tail;           // special tokens of every text
    std::vector<std::u32string> added_tokens;  // a text that spells one out is foreign
};

struct WordPieceResult {
    int64_t total_tokens;
    std::vector<uint32_t> unknown_chars;
};

class WordPiece {
  public:
    explicit WordPiece(WordPieceConfig config);

    // What a character becomes; no part at all: it is dropped.
    void learn(uint32_t code_point, std::span<const CharPart> parts);

    // token_ids: room for slots(texts) ids; the ids of all texts lie behind one another in it at
    // the end.  seqlens, status: [texts.size()].  Safe to call from several threads at once.
    WordPieceResult encode(std::span<const TextView> texts, int64_t max_tokens, int32_t* token_ids,
                           int32_t* seqlens, TextStatus* status, int num_threads) const;

    // Ids that a text of this length takes at most, or it is foreign.
    int64_t slots(int64_t length, int64_t max_tokens) const;

  private:
    struct Slot {  // of an open-addressed table; length 0 is empty
        uint32_t tag, id, offset;
        uint16_t length, is_continuing;
    };
    struct Scratch {
        std::string word;                     // UTF-8
        int64_t num_chars = 0;                // of the word
        std::vector<uint64_t> prefix_hashes;  // of the rest of the word
        std::vector<int32_t> pieces;
        std::vector<uint32_t> unknown_chars;
    };
    struct Output {
        int32_t* ids;
        int64_t count, room, limit;  // limit: where a text is cut
        TextStatus status = TextStatus::whole;

        bool is_open() const {
            return status == TextStatus::whole || status == TextStatus::unknown;
        }
        void push(int32_t id);
    };

    void encode_framed(const TextView& text, Output& out, Scratch& scratch) const;
    template <typename Char>
    void encode_text(std::basic_string_view<Char> text, Output& out, Scratch& scratch) const;
    template <typename Char>
    bool spells_added_token(std::basic_string_view<Char> rest) const;
    uint32_t entry(uint32_t code_point) const;
    void apply(uint32_t entry, Output& out, Scratch& scratch) const;
    void end_word(Output& out, Scratch& scratch) const;
    bool cut_word(Scratch& scratch) const;
    int32_t find(std::string_view piece, bool is_continuing, uint64_t hash) const;
    void insert(std::string_view piece, bool is_continuing, int32_t id);

    WordPieceConfig config_;
    std::vector<Slot> slots_;
    std::string pool_;                   // bytes of all pieces
    size_t longest_piece_ = 1;           // bytes
    mutable std::shared_mutex mutex_;    // guards what follows: encode() reads it, learn() writes
    std::vector<uint32_t> basic_chars_;  // entries of code points below 65536
    std::unordered_map<uint32_t, uint32_t> other_chars_;
    std::vector<CharParts> expansions_;
};

}  // namespace bytetx::cpu
