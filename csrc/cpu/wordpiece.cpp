#include "cpu/wordpiece.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "cpu/parallel.h"

namespace bytetx::cpu {
namespace {

// An entry of the character tables: kind in the upper bits, code point or index in the lower ones.
enum : uint32_t {
    kUnknown = 0,
    kLetter = 1u << 24,
    kBorder = 2u << 24,
    kMark = 3u << 24,
    kDropped = 4u << 24,
    kExpansion = 5u << 24,  // the value is an index of expansions_
    kForeign = 6u << 24,
    kKindMask = 7u << 24,
    kStartsAddedToken = 1u << 28,
    kValueMask = (1u << 21) - 1,
};
constexpr uint32_t kBasicChars = 1u << 16;
constexpr int64_t kTextsPerThread = 64;  // fewer do not pay for the start of a thread, about 20 us
constexpr int64_t kTextsPerDraw = 16;  // threads share the rest of a window while one text is long

// FNV-1a's step with a 64-bit golden ratio; the seed tells pieces at the start of a word from
// others.
constexpr uint64_t hash_seed(bool is_continuing) {
    return is_continuing ? 0x8422'2325'cbf2'9ce4u : 0xcbf2'9ce4'8422'2325u;
}
constexpr uint64_t hash_step(uint64_t hash, char byte) {
    return (hash ^ static_cast<unsigned char>(byte)) * 0x9e37'79b9'7f4a'7c15u;
}
constexpr uint32_t hash_tag(uint64_t hash) { return static_cast<uint32_t>(hash); }
constexpr uint64_t hash_place(uint64_t hash) { return hash >> 32 ^ hash >> 20; }

void append_utf8(std::string& word, uint32_t c) {
    if (c < 0x80) {
        word += static_cast<char>(c);
    } else if (c < 0x800) {
        word += static_cast<char>(0xc0 | c >> 6);
        word += static_cast<char>(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
        word += static_cast<char>(0xe0 | c >> 12);
        word += static_cast<char>(0x80 | (c >> 6 & 0x3f));
        word += static_cast<char>(0x80 | (c & 0x3f));
    } else {
        word += static_cast<char>(0xf0 | c >> 18);
        word += static_cast<char>(0x80 | (c >> 12 & 0x3f));
        word += static_cast<char>(0x80 | (c >> 6 & 0x3f));
        word += static_cast<char>(0x80 | (c & 0x3f));
    }
}

}  // namespace

WordPiece::WordPiece(WordPieceConfig config) : config_(std::move(config)) {
    size_t capacity = 16;
    while (capacity < 2 * config_.vocab.size()) capacity *= 2;
    slots_.resize(capacity);
    basic_chars_.resize(kBasicChars, kUnknown);
    const std::string& prefix = config_.continuing_prefix;
    for (const auto& [token, id] : config_.vocab) {
        const bool is_continuing = token.starts_with(prefix);
        insert(std::string_view(token).substr(is_continuing ? prefix.size() : 0), is_continuing,
               id);
    }
    config_.vocab.clear();
}

void WordPiece::learn(uint32_t code_point, std::span<const CharPart> parts) {
    uint32_t entry = kDropped;
    std::unique_lock lock(mutex_);
    if (std::any_of(parts.begin(), parts.end(),
                    [](const CharPart& part) { return part.kind == CharKind::foreign; })) {
        entry = kForeign;
    } else if (parts.size() > 1) {
        entry = kExpansion | static_cast<uint32_t>(expansions_.size());
        expansions_.emplace_back(parts.begin(), parts.end());
    } else if (parts.size() == 1) {
        const uint32_t kind = parts[0].kind == CharKind::letter ? kLetter
                              : parts[0].kind == CharKind::mark ? kMark
                                                                : kBorder;
        entry = kind | parts[0].code_point;
    }
    for (const std::u32string& token : config_.added_tokens) {
        if (!token.empty() && token[0] == code_point) entry |= kStartsAddedToken;
    }
    if (code_point < kBasicChars) {
        basic_chars_[code_point] = entry;
    } else {
        other_chars_[code_point] = entry;
    }
}

int64_t WordPiece::slots(int64_t length, int64_t max_tokens) const {
    const auto frame = static_cast<int64_t>(config_.head.size() + config_.tail.size());
    return std::min(max_tokens, length + frame);
}

WordPieceResult WordPiece::encode(std::span<const TextView> texts, int64_t max_tokens,
                                  int32_t* token_ids, int32_t* seqlens, TextStatus* status,
                                  int num_threads) const {
    const auto frame = static_cast<int64_t>(config_.head.size() + config_.tail.size());
    if (max_tokens < frame) throw std::invalid_argument("max_tokens is less than special tokens");
    const auto num_texts = static_cast<int64_t>(texts.size());
    std::vector<int64_t> starts(num_texts + 1, 0);
    for (int64_t i = 0; i < num_texts; ++i) {
        starts[i + 1] = starts[i] + slots(texts[i].length, max_tokens);
    }
    WordPieceResult result{0, {}};
    std::mutex result_mutex;
    const std::shared_lock lock(mutex_);
    const int64_t most_threads = std::max<int64_t>(1, num_texts / kTextsPerThread);
    num_threads = static_cast<int>(std::min<int64_t>(num_threads, most_threads));
    own_threads_for(num_texts, kTextsPerDraw, num_threads, [&](int64_t begin, int64_t end) {
        Scratch scratch;
        for (int64_t i = begin; i < end; ++i) {
            Output out{token_ids + starts[i], 0, starts[i + 1] - starts[i], max_tokens};
            encode_framed(texts[i], out, scratch);
            seqlens[i] = static_cast<int32_t>(out.count);
            status[i] = out.status;
        }
        const std::scoped_lock result_lock(result_mutex);
        result.unknown_chars.insert(result.unknown_chars.end(), scratch.unknown_chars.begin(),
                                    scratch.unknown_chars.end());
    });
    for (int64_t i = 0; i < num_texts; ++i) {
        std::memmove(token_ids + result.total_tokens, token_ids + starts[i],
                     seqlens[i] * sizeof(int32_t));
        result.total_tokens += seqlens[i];
    }
    return result;
}

void WordPiece::encode_framed(const TextView& text, Output& out, Scratch& scratch) const {
    const auto length = static_cast<size_t>(text.length);
    out.room -= std::ssize(config_.tail);
    out.limit -= std::ssize(config_.tail);
    std::copy(config_.head.begin(), config_.head.end(), out.ids);
    out.count = std::ssize(config_.head);
    if (text.bytes_per_char == 1) {
        encode_text(std::basic_string_view(static_cast<const uint8_t*>(text.data), length), out,
                    scratch);
    } else if (text.bytes_per_char == 2) {
        encode_text(std::basic_string_view(static_cast<const char16_t*>(text.data), length), out,
                    scratch);
    } else {
        encode_text(std::basic_string_view(static_cast<const char32_t*>(text.data), length), out,
                    scratch);
    }
    std::copy(config_.tail.begin(), config_.tail.end(), out.ids + out.count);
    const bool has_tokens = out.status < TextStatus::foreign;
    out.count = has_tokens ? out.count + std::ssize(config_.tail) : 0;
}

void WordPiece::Output::push(int32_t id) {
    if (!is_open()) return;
    if (count == limit) {
        // With an unknown character in it, where the text is cut is not known yet.
        if (status == TextStatus::whole) status = TextStatus::cut;
    } else if (count == room) {
        status = TextStatus::foreign;
    } else {
        ids[count++] = id;
    }
}

template <typename Char>
void WordPiece::encode_text(std::basic_string_view<Char> text, Output& out,
                            Scratch& scratch) const {
    scratch.word.clear();
    scratch.num_chars = 0;
    for (size_t i = 0; i < text.size() && out.is_open(); ++i) {
        const auto c = static_cast<uint32_t>(text[i]);
        const uint32_t found = c < kBasicChars ? basic_chars_[c] : entry(c);
        if ((found & kStartsAddedToken) && spells_added_token(text.substr(i))) {
            out.status = TextStatus::foreign;
            return;
        }
        if ((found & kKindMask) == kLetter) {
            append_utf8(scratch.word, found & kValueMask);
            ++scratch.num_chars;
        } else if ((found & kKindMask) == kUnknown) {
            scratch.unknown_chars.push_back(c);
            out.status = TextStatus::unknown;
        } else {
            apply(found, out, scratch);
        }
    }
    end_word(out, scratch);
}

template <typename Char>
bool WordPiece::spells_added_token(std::basic_string_view<Char> rest) const {
    return std::any_of(
        config_.added_tokens.begin(), config_.added_tokens.end(), [&](const std::u32string& token) {
            return rest.size() >= token.size() &&
                   std::equal(token.begin(), token.end(), rest.begin(), [](char32_t a, Char b) {
                       return static_cast<uint32_t>(a) == static_cast<uint32_t>(b);
                   });
        });
}

uint32_t WordPiece::entry(uint32_t code_point) const {
    const auto found = other_chars_.find(code_point);
    return found == other_chars_.end() ? static_cast<uint32_t>(kUnknown) : found->second;
}

void WordPiece::apply(uint32_t entry, Output& out, Scratch& scratch) const {
    auto apply_part = [&](CharKind kind, uint32_t code_point) {
        if (kind != CharKind::letter) end_word(out, scratch);
        if (kind == CharKind::border) return;
        append_utf8(scratch.word, code_point);
        ++scratch.num_chars;
        if (kind == CharKind::mark) end_word(out, scratch);
    };
    const uint32_t kind = entry & kKindMask, value = entry & kValueMask;
    if (kind == kBorder) {
        end_word(out, scratch);
    } else if (kind == kMark) {
        apply_part(CharKind::mark, value);
    } else if (kind == kExpansion) {
        for (const CharPart& part : expansions_[value]) apply_part(part.kind, part.code_point);
    } else if (kind == kForeign) {
        out.status = TextStatus::foreign;
    }
}

void WordPiece::end_word(Output& out, Scratch& scratch) const {
    if (scratch.num_chars == 0) return;
    if (scratch.num_chars <= config_.max_word_chars && cut_word(scratch)) {
        for (const int32_t piece : scratch.pieces) out.push(piece);
    } else {
        out.push(config_.unk_id);
    }
    scratch.word.clear();
    scratch.num_chars = 0;
}

// The longest piece first, then the longest that continues it, and so on to the end.
bool WordPiece::cut_word(Scratch& scratch) const {
    const std::string_view word = scratch.word;
    scratch.pieces.clear();
    scratch.prefix_hashes.resize(longest_piece_ + 1);
    for (size_t start = 0; start < word.size();) {
        const bool is_continuing = start > 0;
        const size_t longest = std::min(word.size() - start, longest_piece_);
        uint64_t hash = hash_seed(is_continuing);
        for (size_t i = 0; i < longest; ++i) {
            hash = hash_step(hash, word[start + i]);
            scratch.prefix_hashes[i + 1] = hash;
        }
        size_t length = longest;
        int32_t id = -1;
        for (; length > 0; --length) {
            id = find(word.substr(start, length), is_continuing, scratch.prefix_hashes[length]);
            if (id >= 0) break;
        }
        if (id < 0) return false;
        scratch.pieces.push_back(id);
        start += length;
    }
    return true;
}

int32_t WordPiece::find(std::string_view piece, bool is_continuing, uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    for (size_t i = hash_place(hash) & mask; slots_[i].length != 0; i = (i + 1) & mask) {
        const Slot& slot = slots_[i];
        if (slot.tag == hash_tag(hash) && slot.length == piece.size() &&
            slot.is_continuing == is_continuing &&
            std::memcmp(pool_.data() + slot.offset, piece.data(), piece.size()) == 0) {
            return static_cast<int32_t>(slot.id);
        }
    }
    return -1;
}

void WordPiece::insert(std::string_view piece, bool is_continuing, int32_t id) {
    // No word reaches either: the empty piece, and pieces longer than the longest word.
    if (piece.empty() || piece.size() > 4 * static_cast<uint64_t>(config_.max_word_chars)) return;
    if (piece.size() > UINT16_MAX) throw std::invalid_argument("a piece is longer than 65535");
    uint64_t hash = hash_seed(is_continuing);
    for (const char byte : piece) hash = hash_step(hash, byte);
    const size_t mask = slots_.size() - 1;
    size_t i = hash_place(hash) & mask;
    while (slots_[i].length != 0) i = (i + 1) & mask;
    slots_[i] = {hash_tag(hash), static_cast<uint32_t>(id), static_cast<uint32_t>(pool_.size()),
                 static_cast<uint16_t>(piece.size()), is_continuing};
    pool_ += piece;
    longest_piece_ = std::max(longest_piece_, piece.size());
}

}  // namespace bytetx::cpu
