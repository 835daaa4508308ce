// WordPiece, the tokenizer of BERT: characters -> words -> token ids of a vocabulary.
//
// Normalisation of a character (lower case, accents, punctuation) is not decided here: it is put
// into a CharacterTable from what the tokenizer's own library does with that character alone. This
// serves tokenizers whose characters do not depend on each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bytetx::cpu {

enum class CharacterKind : uint8_t {
    word,   // goes on with a word
    alone,  // is a word of its own
    space,  // ends a word and belongs to none
};

// A character of normalized text.
struct NormalizedCharacter {
    CharacterKind kind;
    std::string utf8;
};

// Normalised form of each code point. A table that threads read is never changed: a copy is.
class CharacterTable {
  public:
    enum class Form : uint8_t { unknown, refused, plain, several };

    // The normalized character of a plain code point: at most one, of at most 4 bytes.
    struct Entry {
        Form form = Form::unknown;
        CharacterKind kind = CharacterKind::word;
        uint8_t num_bytes = 0;  // 0: the character is dropped
        bool begins_added_token = false;
        char bytes[4] = {};
        uint32_t several = 0;  // index of the characters of Form::several
    };

    const Entry& operator[](uint32_t code_point) const {
        return code_point < entries_.size() ? entries_[code_point] : unknown_;
    }
    const std::vector<NormalizedCharacter>& several(const Entry& entry) const {
        return several_[entry.several];
    }

    void set(uint32_t code_point, std::vector<NormalizedCharacter> characters);
    // Texts with this code point are left to the tokenizer's own library.
    void refuse(uint32_t code_point);
    void mark_added_token(uint32_t first_code_point);

  private:
    Entry& entry(uint32_t code_point);

    std::vector<Entry> entries_;
    std::vector<std::vector<NormalizedCharacter>> several_;
    Entry unknown_;
};

// The vocabulary as a trie over bytes, its edges in one hash table.
class TokenTrie {
  public:
    struct Match {
        int32_t token_id;  // -1: none
        size_t num_bytes;
    };

    // token_ids: of tokens in UTF-8; continuing_prefix: of those that continue a word, "##".
    TokenTrie(const std::vector<std::pair<std::string, int32_t>>& token_ids,
              const std::string& continuing_prefix);

    // The longest token that `bytes` begin with.
    Match longest(std::string_view bytes, bool continues_word) const;

  private:
    struct Edge {
        uint32_t key;    // node * 256 + byte
        uint32_t child;  // with kEndsToken, where a token ends there
    };
    static constexpr uint32_t kEndsToken = 1u << 31;

    uint32_t place_of(uint32_t key) const { return key * 0x9e3779b1u >> shift_; }
    const Edge* find(uint32_t node, uint8_t byte) const;
    Edge& find_or_add(uint32_t node, uint8_t byte);

    std::vector<Edge> edges_;
    std::vector<int32_t> token_ids_;  // tokens of the nodes where one ends
    uint32_t mask_ = 0;
    int shift_ = 0;
    uint32_t num_nodes_ = 1;
    uint32_t continuing_root_ = 0;
    bool has_continuing_ = false;
};

struct WordPieceModel {
    TokenTrie trie;
    int32_t unk_token_id;
    int64_t max_word_characters;                      // longest word that is looked up at all
    std::vector<int32_t> start, end;                  // tokens that frame a text
    std::vector<std::vector<uint32_t>> added_tokens;  // code points of tokens that are found in
                                                      // text before it is normalized
};

// A Python string: code points of 1, 2 or 4 bytes.
struct TextView {
    const void* data;
    int64_t length;
    int32_t bytes_per_character;
};

enum class TextState : uint8_t {
    read,
    truncated,  // read, and there was more
    refused,    // an added token is in it, or a character that the table refuses
    unknown,    // a character is in it that the table does not know yet
};

struct TextResult {
    TextState state = TextState::unknown;
    std::vector<int32_t> const* tokens = nullptr;  // where its ids are
    int64_t first = 0;
    int64_t num_tokens = 0;
};

// Texts to ids; each text is cut to max_tokens, its frame included, and no more of it is read.
class WordPieceRun {
  public:
    WordPieceRun(const WordPieceModel& model, std::vector<TextView> texts, int64_t max_tokens);

    // Reads the texts that are `unknown`, in num_threads threads. Returns the code points that the
    // table does not know, sorted.
    std::vector<uint32_t> read(const CharacterTable& table, int32_t num_threads);

    const std::vector<TextResult>& results() const { return results_; }
    int64_t total_tokens() const;
    void copy_ids(int32_t* out) const;

  private:
    const WordPieceModel& model_;
    std::vector<TextView> texts_;
    int64_t max_tokens_;
    std::vector<TextResult> results_;
    std::vector<std::unique_ptr<std::vector<int32_t>>> chunks_;  // ids of some texts each
};

}  // namespace bytetx::cpu
