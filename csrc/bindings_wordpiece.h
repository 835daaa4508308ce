// The tokenizer WordPiece as a Python class: strings to ids, without Python's lock while it reads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu/wordpiece.h"

namespace bytetx {

class WordPiece {
  public:
    // token_ids: of the vocabulary.  added_tokens: texts with one are refused.  start, end: ids
    // that frame a text.
    WordPiece(const py::dict& token_ids, int32_t unk_token_id, const std::string& continuing_prefix,
              int64_t max_word_characters, std::vector<int32_t> start, std::vector<int32_t> end,
              const std::vector<std::string>& added_tokens)
        : model_{cpu::TokenTrie(pairs_of(token_ids), continuing_prefix),
                 unk_token_id,
                 max_word_characters,
                 std::move(start),
                 std::move(end),
                 {}},
          characters_(std::make_shared<cpu::CharacterTable>()) {
        auto table = std::make_shared<cpu::CharacterTable>();
        for (const std::string& token : added_tokens) {
            const std::vector<uint32_t> code_points = code_points_of(py::str(token));
            if (code_points.empty()) continue;
            table->mark_added_token(code_points[0]);
            model_.added_tokens.push_back(code_points);
        }
        characters_ = std::move(table);
    }

    // Result of one character: (kind, UTF-8) of each normalized one, None: refused.
    using Learned = std::optional<std::vector<std::pair<int, std::string>>>;

    void learn(const std::vector<std::pair<uint32_t, Learned>>& characters) {
        auto table = std::make_shared<cpu::CharacterTable>(*characters_);
        for (const auto& [code_point, learned] : characters) {
            if (!learned) {
                table->refuse(code_point);
                continue;
            }
            std::vector<cpu::NormalizedCharacter> normalized;
            for (const auto& [kind, utf8] : *learned) {
                normalized.push_back({static_cast<cpu::CharacterKind>(kind), utf8});
            }
            table->set(code_point, std::move(normalized));
        }
        characters_ = std::move(table);  // threads that read have the one before
    }

    // Texts to (ids, lengths, states): int32 of all texts behind one another, int32 and uint8 a
    // text; None where all states are 0.  find_characters: takes code points that the table does
    // not know, and calls learn().
    py::tuple encode(const py::list& texts, int64_t max_tokens, int32_t num_threads,
                     const py::object& find_characters) {
        const auto kept = py::tuple(texts);  // the strings live while other threads run
        cpu::WordPieceRun run(model_, views_of(kept), max_tokens);
        // A pass's unknown characters are learnt for the next one; a character that is still not
        // known then was not given by find_characters, and its text stays unread.
        constexpr int kPasses = 4;
        for (int pass = 0; pass < kPasses; ++pass) {
            const std::shared_ptr<const cpu::CharacterTable> table = characters_;
            std::vector<uint32_t> unknown;
            {
                const py::gil_scoped_release release;
                unknown = run.read(*table, num_threads);
            }
            if (unknown.empty()) break;
            if (pass + 1 < kPasses) find_characters(unknown);
        }
        const auto& results = run.results();
        const auto num_texts = static_cast<py::ssize_t>(results.size());
        py::bytearray ids = new_bytes(run.total_tokens() * sizeof(int32_t));
        py::bytearray lengths = new_bytes(num_texts * sizeof(int32_t));
        run.copy_ids(reinterpret_cast<int32_t*>(PyByteArray_AS_STRING(ids.ptr())));
        auto* length = reinterpret_cast<int32_t*>(PyByteArray_AS_STRING(lengths.ptr()));
        bool are_read = true;
        for (const cpu::TextResult& result : results) {
            *length++ = static_cast<int32_t>(result.num_tokens);
            are_read = are_read && result.state == cpu::TextState::read;
        }
        if (are_read) return py::make_tuple(ids, lengths, py::none());
        py::bytearray states = new_bytes(num_texts);
        auto* state = reinterpret_cast<uint8_t*>(PyByteArray_AS_STRING(states.ptr()));
        for (const cpu::TextResult& result : results) {
            *state++ = static_cast<uint8_t>(result.state);
        }
        return py::make_tuple(ids, lengths, states);
    }

  private:
    static std::vector<std::pair<std::string, int32_t>> pairs_of(const py::dict& token_ids) {
        std::vector<std::pair<std::string, int32_t>> pairs;
        pairs.reserve(token_ids.size());
        for (const auto& [token, id] : token_ids) {
            pairs.emplace_back(py::cast<std::string>(token), py::cast<int32_t>(id));
        }
        return pairs;
    }

    static cpu::TextView view_of(PyObject* text) {
        if (!PyUnicode_Check(text)) {
            throw py::type_error("texts must be str, got " +
                                 std::string(py::str(py::type::handle_of(text))));
        }
        return {PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text),
                static_cast<int32_t>(PyUnicode_KIND(text))};
    }

    static std::vector<cpu::TextView> views_of(const py::tuple& texts) {
        std::vector<cpu::TextView> views;
        views.reserve(texts.size());
        for (const py::handle text : texts) views.push_back(view_of(text.ptr()));
        return views;
    }

    static std::vector<uint32_t> code_points_of(const py::str& text) {
        std::vector<uint32_t> found;
        for (Py_ssize_t i = 0; i < PyUnicode_GET_LENGTH(text.ptr()); ++i) {
            found.push_back(PyUnicode_READ_CHAR(text.ptr(), i));
        }
        return found;
    }

    static py::bytearray new_bytes(int64_t size) {
        PyObject* bytes = PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
        if (bytes == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::bytearray>(bytes);
    }

    cpu::WordPieceModel model_;
    std::shared_ptr<const cpu::CharacterTable> characters_;
};

inline void bind_wordpiece(py::module_& m) {
    py::class_<WordPiece>(m, "WordPiece")
        .def(py::init<const py::dict&, int32_t, const std::string&, int64_t, std::vector<int32_t>,
                      std::vector<int32_t>, const std::vector<std::string>&>())
        .def("learn", &WordPiece::learn)
        .def("encode", &WordPiece::encode);
}

}  // namespace bytetx
