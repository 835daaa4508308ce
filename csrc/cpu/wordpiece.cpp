// WordPiece. A word's tokens are found greedily, the longest first, by walking down the trie: one
// look-up a byte, where the usual search hashes every prefix of what is left of a word.
//
// English prose of 90 tokens a text takes 6 to 7 us a text on one core of an AMD EPYC, the library
// `tokenizers` 180 to 360 us (docs/kernels/cpu.md): it keeps offsets, strings and marks of every
// token, which nobody reads who only wants ids.

#include "cpu/wordpiece.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace bytetx::cpu {
namespace {

constexpr uint32_t kNoEdge = 0xffffffff;
constexpr uint32_t kMaxNodes = 1 << 24;  // a node and a byte are one key of 32 bits
constexpr int64_t kTextsPerChunk = 32;
// Characters searched for more unknown ones, from the first that the table does not know on.
constexpr int64_t kLookAhead = 4096;

// Reads texts one after the other; its buffer is used again for each word.
class Reader {
  public:
    Reader(const WordPieceModel& model, const CharacterTable& table, int64_t max_tokens)
        : model_(model),
          table_(table),
          max_words_(max_tokens - static_cast<int64_t>(model.start.size() + model.end.size())) {}

    TextState read(const TextView& text, std::vector<int32_t>& ids,
                   std::vector<uint32_t>& unknown) {
        switch (text.bytes_per_character) {
            case 1:
                return read_characters(static_cast<const uint8_t*>(text.data), text, ids, unknown);
            case 2:
                return read_characters(static_cast<const uint16_t*>(text.data), text, ids, unknown);
            default:
                return read_characters(static_cast<const uint32_t*>(text.data), text, ids, unknown);
        }
    }

  private:
    template <typename Character>
    TextState read_characters(const Character* text, const TextView& view,
                              std::vector<int32_t>& ids, std::vector<uint32_t>& unknown) {
        ids.insert(ids.end(), model_.start.begin(), model_.start.end());
        const size_t first = ids.size();
        bytes_.clear();
        num_characters_ = 0;
        for (int64_t i = 0; i < view.length; ++i) {
            const CharacterTable::Entry& entry = table_[text[i]];
            if (entry.begins_added_token && is_added_token(text + i, view.length - i)) {
                return TextState::refused;
            }
            switch (entry.form) {
                case CharacterTable::Form::plain:
                    add(entry.kind, {entry.bytes, entry.num_bytes}, ids);
                    break;
                case CharacterTable::Form::several:
                    for (const NormalizedCharacter& each : table_.several(entry)) {
                        add(each.kind, each.utf8, ids);
                    }
                    break;
                case CharacterTable::Form::refused:
                    return TextState::refused;
                case CharacterTable::Form::unknown:
                    find_unknown(text + i, std::min(view.length - i, kLookAhead), unknown);
                    return TextState::unknown;
            }
            if (static_cast<int64_t>(ids.size() - first) > max_words_) break;
        }
        end_word(ids);
        const bool is_truncated = static_cast<int64_t>(ids.size() - first) > max_words_;
        if (is_truncated) ids.resize(first + max_words_);
        ids.insert(ids.end(), model_.end.begin(), model_.end.end());
        return is_truncated ? TextState::truncated : TextState::read;
    }

    void add(CharacterKind kind, std::string_view utf8, std::vector<int32_t>& ids) {
        if (kind != CharacterKind::word) {
            end_word(ids);
            if (kind == CharacterKind::space) return;
        }
        if (utf8.empty()) return;
        // A longer word is unknown, whatever it is: no more of it is kept.
        if (num_characters_++ <= model_.max_word_characters) {
            if (utf8.size() == 1) {
                bytes_.push_back(utf8[0]);
            } else {
                bytes_.append(utf8);
            }
        }
        if (kind == CharacterKind::alone) end_word(ids);
    }

    void end_word(std::vector<int32_t>& ids) {
        if (num_characters_ == 0) return;
        const size_t before = ids.size();
        bool is_known = num_characters_ <= model_.max_word_characters;
        std::string_view rest(bytes_);
        while (is_known && !rest.empty()) {
            const TokenTrie::Match match = model_.trie.longest(rest, ids.size() > before);
            is_known = match.token_id >= 0;
            if (!is_known) break;
            ids.push_back(match.token_id);
            rest.remove_prefix(match.num_bytes);
        }
        if (!is_known) {
            ids.resize(before);
            ids.push_back(model_.unk_token_id);
        }
        bytes_.clear();
        num_characters_ = 0;
    }

    template <typename Character>
    bool is_added_token(const Character* text, int64_t length) const {
        for (const std::vector<uint32_t>& token : model_.added_tokens) {
            if (static_cast<int64_t>(token.size()) <= length &&
                std::equal(token.begin(), token.end(), text)) {
                return true;
            }
        }
        return false;
    }

    template <typename Character>
    void find_unknown(const Character* text, int64_t length, std::vector<uint32_t>& unknown) {
        for (int64_t i = 0; i < length; ++i) {
            if (table_[text[i]].form == CharacterTable::Form::unknown) unknown.push_back(text[i]);
        }
    }

    const WordPieceModel& model_;
    const CharacterTable& table_;
    int64_t max_words_;  // tokens of a text without its frame
    std::string bytes_;  // bytes of the word that is being read
    int64_t num_characters_ = 0;
};

}  // namespace

CharacterTable::Entry& CharacterTable::entry(uint32_t code_point) {
    if (code_point >= entries_.size()) entries_.resize(code_point + 1);
    return entries_[code_point];
}

void CharacterTable::set(uint32_t code_point, std::vector<NormalizedCharacter> characters) {
    Entry& entry = this->entry(code_point);
    if (characters.size() > 1 || (characters.size() == 1 && characters[0].utf8.size() > 4)) {
        entry.form = Form::several;
        entry.several = static_cast<uint32_t>(several_.size());
        several_.push_back(std::move(characters));
        return;
    }
    entry.form = Form::plain;
    if (characters.empty()) return;
    entry.kind = characters[0].kind;
    entry.num_bytes = static_cast<uint8_t>(characters[0].utf8.size());
    std::memcpy(entry.bytes, characters[0].utf8.data(), entry.num_bytes);
}

void CharacterTable::refuse(uint32_t code_point) { entry(code_point).form = Form::refused; }

void CharacterTable::mark_added_token(uint32_t first_code_point) {
    entry(first_code_point).begins_added_token = true;
}

TokenTrie::TokenTrie(const std::vector<std::pair<std::string, int32_t>>& token_ids,
                     const std::string& continuing_prefix) {
    size_t num_bytes = 0;
    for (const auto& [token, id] : token_ids) num_bytes += token.size();
    // At most half full, even where no tokens share a beginning.
    size_t capacity = 1024;
    while (capacity < 2 * num_bytes) capacity *= 2;
    edges_.assign(capacity, Edge{kNoEdge, 0});
    mask_ = static_cast<uint32_t>(capacity - 1);
    shift_ = 32 - std::countr_zero(capacity);
    for (const auto& [token, id] : token_ids) {
        if (token.empty()) continue;
        uint32_t node = 0;
        Edge* edge = nullptr;
        for (const char byte : token) {
            edge = &find_or_add(node, static_cast<uint8_t>(byte));
            node = edge->child & ~kEndsToken;
        }
        edge->child |= kEndsToken;
        token_ids_.resize(std::max<size_t>(token_ids_.size(), num_nodes_), -1);
        token_ids_[node] = id;
    }
    has_continuing_ = true;
    for (const char byte : continuing_prefix) {
        const Edge* edge = find(continuing_root_, static_cast<uint8_t>(byte));
        if (edge == nullptr) {  // no token continues a word
            has_continuing_ = false;
            break;
        }
        continuing_root_ = edge->child & ~kEndsToken;
    }
}

TokenTrie::Match TokenTrie::longest(std::string_view bytes, bool continues_word) const {
    if (continues_word && !has_continuing_) return {-1, 0};
    uint32_t node = continues_word ? continuing_root_ : 0, last = 0;
    size_t num_bytes = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
        const Edge* edge = find(node, static_cast<uint8_t>(bytes[i]));
        if (edge == nullptr) break;
        node = edge->child & ~kEndsToken;
        if (edge->child & kEndsToken) {
            last = node;
            num_bytes = i + 1;
        }
    }
    return {num_bytes == 0 ? -1 : token_ids_[last], num_bytes};
}

const TokenTrie::Edge* TokenTrie::find(uint32_t node, uint8_t byte) const {
    const uint32_t key = node << 8 | byte;
    for (uint32_t place = place_of(key);; place = (place + 1) & mask_) {
        const Edge& edge = edges_[place];
        if (edge.key == key) return &edge;
        if (edge.key == kNoEdge) return nullptr;
    }
}

TokenTrie::Edge& TokenTrie::find_or_add(uint32_t node, uint8_t byte) {
    const uint32_t key = node << 8 | byte;
    uint32_t place = place_of(key);
    while (edges_[place].key != key && edges_[place].key != kNoEdge) place = (place + 1) & mask_;
    Edge& edge = edges_[place];
    if (edge.key == kNoEdge) {
        if (num_nodes_ + 1 >= kMaxNodes) throw std::invalid_argument("the vocabulary is too large");
        edge.key = key;
        edge.child = num_nodes_++;
    }
    return edge;
}

WordPieceRun::WordPieceRun(const WordPieceModel& model, std::vector<TextView> texts,
                           int64_t max_tokens)
    : model_(model), texts_(std::move(texts)), max_tokens_(max_tokens), results_(texts_.size()) {}

std::vector<uint32_t> WordPieceRun::read(const CharacterTable& table, int32_t num_threads) {
    std::vector<int64_t> waiting;
    for (size_t i = 0; i < results_.size(); ++i) {
        if (results_[i].state == TextState::unknown) waiting.push_back(static_cast<int64_t>(i));
    }
    const auto num_waiting = static_cast<int64_t>(waiting.size());
    const int64_t num_chunks = (num_waiting + kTextsPerChunk - 1) / kTextsPerChunk;
    const size_t first_chunk = chunks_.size();
    for (int64_t i = 0; i < num_chunks; ++i) {
        chunks_.push_back(std::make_unique<std::vector<int32_t>>());
    }
    std::vector<std::vector<uint32_t>> unknown(num_chunks);
    std::vector<std::exception_ptr> errors(num_chunks);
    std::atomic<int64_t> next{0};
    auto work = [&] {
        Reader reader(model_, table, max_tokens_);
        for (int64_t chunk = next++; chunk < num_chunks; chunk = next++) {
            try {
                std::vector<int32_t>& ids = *chunks_[first_chunk + chunk];
                const int64_t stop = std::min((chunk + 1) * kTextsPerChunk, num_waiting);
                for (int64_t i = chunk * kTextsPerChunk; i < stop; ++i) {
                    TextResult& result = results_[waiting[i]];
                    result.first = static_cast<int64_t>(ids.size());
                    result.tokens = &ids;
                    result.state = reader.read(texts_[waiting[i]], ids, unknown[chunk]);
                    if (result.state >= TextState::refused) ids.resize(result.first);
                    result.num_tokens = static_cast<int64_t>(ids.size()) - result.first;
                }
            } catch (...) {
                errors[chunk] = std::current_exception();
            }
        }
    };
    std::vector<std::thread> threads;
    try {
        for (int64_t i = 1; i < std::min<int64_t>(num_threads, num_chunks); ++i) {
            threads.emplace_back(work);
        }
    } catch (const std::system_error&) {  // no thread to be had: those that run do the work
    }
    work();
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
    std::vector<uint32_t> found;
    for (const std::vector<uint32_t>& some : unknown) {
        found.insert(found.end(), some.begin(), some.end());
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

int64_t WordPieceRun::total_tokens() const {
    int64_t total = 0;
    for (const TextResult& result : results_) total += result.num_tokens;
    return total;
}

void WordPieceRun::copy_ids(int32_t* out) const {
    for (const TextResult& result : results_) {
        if (result.num_tokens == 0) continue;
        std::memcpy(out, result.tokens->data() + result.first, result.num_tokens * sizeof(int32_t));
        out += result.num_tokens;
    }
}

}  // namespace bytetx::cpu
