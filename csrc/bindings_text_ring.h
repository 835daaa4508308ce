// The ring of texts between two processes as a Python class.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "cpu/text_ring.h"

namespace bytetx {

class PyTextRing {
  public:
    // memory: writable, shared by both processes.
    PyTextRing(const py::buffer& memory, int64_t num_slots, int64_t max_tokens, int64_t width)
        : sizes_(checked(num_slots, max_tokens, width)),
          memory_(memory.request(true)),
          ring_(bytes_of(memory_, sizes_), sizes_),
          is_open_(num_slots) {}

    static int64_t num_bytes(int64_t num_slots, int64_t max_tokens, int64_t width) {
        return checked(num_slots, max_tokens, width).num_bytes();
    }

    // Bytes before (SlotFacts, token ids, vectors).
    py::tuple starts() const {
        return py::make_tuple(sizes_.facts(), sizes_.token_ids(), sizes_.vectors());
    }

    bool submit(const py::buffer& entries) {
        const py::buffer_info info = entries.request();
        return ring_.submit(ints<int32_t>(info), info.size);
    }

    py::bytearray take_done() {
        const int64_t count = ring_.num_newly_done();
        py::bytearray slots = new_bytes(4 * count);
        ring_.take_done(data<int32_t>(slots), count);
        return slots;
    }

    bool has_entries() const { return ring_.has_entries(); }
    bool start_waiting() { return ring_.start_waiting(); }

    // The rest is for the engine's process and takes all rings of a model, which have equal sizes.
    // The index of a text is its slot and num_slots for each ring before its own.

    // Takes all that was submitted since the last call, the longest texts first: (int64 indices;
    // int32 kinds, groups, seqlens and prompt_tokens; bool is_truncated; int32 token ids; int64
    // indices of cancelled texts; whether texts have several kinds, any has a group, any has a
    // prompt; the numbers of rings whose memory is damaged).
    static py::tuple take(const py::list& rings, bool has_waited) {
        std::vector<Text> texts;
        std::vector<int64_t> cancelled;
        py::list damaged;
        std::vector<int32_t> entries;
        for (size_t number = 0; number < rings.size(); ++number) {
            auto& own = rings[number].cast<PyTextRing&>();
            if (has_waited) own.ring_.stop_waiting();
            const size_t num_texts = texts.size(), num_cancelled = cancelled.size();
            try {
                own.take_into(texts, cancelled, entries, static_cast<int64_t>(number));
            } catch (const std::runtime_error&) {
                texts.resize(num_texts);
                cancelled.resize(num_cancelled);
                damaged.append(number);
            }
        }
        std::stable_sort(texts.begin(), texts.end(), [](const Text& one, const Text& other) {
            return one.seqlen > other.seqlen;
        });
        int64_t total_tokens = 0;
        for (const Text& text : texts) total_tokens += text.seqlen;
        const auto count = static_cast<int64_t>(texts.size());
        py::bytearray indices = new_bytes(8 * count), is_truncated = new_bytes(count), columns[4];
        for (py::bytearray& column : columns) column = new_bytes(4 * count);
        py::bytearray token_ids = new_bytes(4 * total_tokens);
        bool has_kinds = false, has_groups = false, has_prompts = false;
        auto* ids = data<int32_t>(token_ids);
        for (int64_t i = 0; i < count; ++i) {
            const Text& text = texts[i];
            data<int64_t>(indices)[i] = text.index;
            data<int32_t>(columns[0])[i] = text.kind;
            data<int32_t>(columns[1])[i] = text.group;
            data<int32_t>(columns[2])[i] = text.seqlen;
            data<int32_t>(columns[3])[i] = text.prompt_tokens;
            data<bool>(is_truncated)[i] = text.is_truncated;
            ids = std::copy_n(text.token_ids, text.seqlen, ids);
            has_kinds |= text.kind != texts[0].kind;
            has_groups |= text.group != 0;
            has_prompts |= text.prompt_tokens != 0;
        }
        py::bytearray gone = new_bytes(8 * static_cast<int64_t>(cancelled.size()));
        std::copy(cancelled.begin(), cancelled.end(), data<int64_t>(gone));
        return py::make_tuple(indices, columns[0], columns[1], columns[2], columns[3], is_truncated,
                              token_ids, gone, has_kinds, has_groups, has_prompts, damaged);
    }

    // Writes vectors. indices: int64.  rows: f32 [num_texts, size] in one piece.
    static void put(const py::list& rings, const py::buffer& indices, const py::buffer& rows) {
        const py::buffer_info at = indices.request(), from = rows.request();
        const int64_t* own = ints<int64_t>(at);
        const int64_t size = from.ndim == 2 ? from.shape[1] : 0;
        if (from.itemsize != 4 || from.ndim != 2 || from.shape[0] != at.size ||
            (from.size && (from.strides[1] != 4 || from.strides[0] != 4 * size))) {
            throw py::value_error("vectors must be f32, one row for each text, in one piece");
        }
        const auto* row = static_cast<const float*>(from.ptr);
        for (int64_t i = 0; i < at.size; ++i, row += size) {
            const Place place = place_of(rings, own[i]);
            if (size > place.ring->sizes_.width) throw py::value_error("a vector is too long");
            std::copy_n(row, size, place.ring->ring_.vector(place.slot));
            place.ring->ring_.facts(place.slot).state = kHasVector;
            place.ring->is_open_[place.slot] = false;
        }
    }

    // Says that texts have no vector. Returns the int64 indices of those that had none yet.
    static py::bytearray fail(const py::list& rings, const py::buffer& indices) {
        const py::buffer_info at = indices.request();
        const int64_t* own = ints<int64_t>(at);
        std::vector<int64_t> failed;
        for (int64_t i = 0; i < at.size; ++i) {
            const Place place = place_of(rings, own[i]);
            if (!place.ring->is_open_[place.slot]) continue;
            place.ring->ring_.facts(place.slot).state = kHasNone;
            place.ring->is_open_[place.slot] = false;
            failed.push_back(own[i]);
        }
        py::bytearray found = new_bytes(8 * static_cast<int64_t>(failed.size()));
        std::copy(failed.begin(), failed.end(), data<int64_t>(found));
        return found;
    }

    // Gives texts back, whose mean seconds these are. Returns the numbers of the rings whose
    // front-ends are to be woken.
    static py::list give(const py::list& rings, const py::buffer& indices, float queue_seconds,
                         float compute_seconds) {
        const py::buffer_info at = indices.request();
        const int64_t* own = ints<int64_t>(at);
        std::vector<std::vector<int32_t>> slots(rings.size());
        for (int64_t i = 0; i < at.size; ++i) {
            const Place place = place_of(rings, own[i]);
            cpu::SlotFacts& facts = place.ring->ring_.facts(place.slot);
            facts.queue_seconds = queue_seconds;
            facts.compute_seconds = compute_seconds;
            slots[place.number].push_back(place.slot);
        }
        py::list woken;
        for (size_t number = 0; number < slots.size(); ++number) {
            const auto count = static_cast<int64_t>(slots[number].size());
            auto& ring = rings[number].cast<PyTextRing&>().ring_;
            if (count && ring.finish(slots[number].data(), count)) woken.append(number);
        }
        return woken;
    }

  private:
    static constexpr int32_t kHasVector = 0, kHasNone = 1;  // states

    struct Text {
        int64_t index;
        int32_t kind, group, seqlen, prompt_tokens;
        bool is_truncated;
        const int32_t* token_ids;
    };

    struct Place {
        PyTextRing* ring;
        int64_t number;
        int32_t slot;
    };

    void take_into(std::vector<Text>& texts, std::vector<int64_t>& cancelled,
                   std::vector<int32_t>& entries, int64_t number) {
        if (!ring_.has_entries()) return;
        const int64_t first = number * sizes_.num_slots;
        entries.resize(ring_.num_new_entries());
        ring_.take_entries(entries.data(), static_cast<int64_t>(entries.size()));
        for (const int32_t entry : entries) {
            const int32_t slot = entry < 0 ? ~entry : entry;
            const int32_t length = ring_.seqlen(slot);  // read once: a front-end could change it
            if (entry < 0) {
                cancelled.push_back(first + slot);
                continue;
            }
            const cpu::SlotFacts& facts = ring_.facts(slot);
            texts.push_back({first + slot, facts.kind, facts.group, length, facts.prompt_tokens,
                             facts.is_truncated != 0, ring_.token_ids(slot)});
            is_open_[slot] = true;
        }
    }

    static Place place_of(const py::list& rings, int64_t index) {
        if (!rings.empty() && index >= 0) {
            const int64_t num_slots = rings[0].cast<PyTextRing&>().sizes_.num_slots;
            const int64_t number = index / num_slots;
            if (number < static_cast<int64_t>(rings.size())) {
                auto& ring = rings[number].cast<PyTextRing&>();
                const int64_t slot = index % num_slots;
                if (slot < ring.sizes_.num_slots)
                    return {&ring, number, static_cast<int32_t>(slot)};
            }
        }
        throw py::value_error("no ring has such a text");
    }

    static cpu::TextRingSizes checked(int64_t num_slots, int64_t max_tokens, int64_t width) {
        constexpr int64_t kMost = int64_t{1} << 24;
        for (const int64_t size : {num_slots, max_tokens, width}) {
            if (size < 1 || size > kMost) throw py::value_error("the ring's sizes are 1 ... 2^24");
        }
        return {num_slots, max_tokens, width};
    }

    static uint8_t* bytes_of(const py::buffer_info& memory, const cpu::TextRingSizes& sizes) {
        if (memory.size * memory.itemsize < sizes.num_bytes()) {
            throw py::value_error("the memory is smaller than the ring");
        }
        return static_cast<uint8_t*>(memory.ptr);
    }

    template <typename T>
    static const T* ints(const py::buffer_info& info) {
        if (info.itemsize != sizeof(T) || info.ndim != 1 ||
            (info.size && info.strides[0] != sizeof(T))) {
            throw py::value_error("slots must be int32 and indices int64, in one piece");
        }
        return static_cast<const T*>(info.ptr);
    }

    static py::bytearray new_bytes(int64_t count) {
        PyObject* bytes = PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count));
        if (bytes == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::bytearray>(bytes);
    }

    template <typename T>
    static T* data(py::bytearray& bytes) {
        return reinterpret_cast<T*>(PyByteArray_AS_STRING(bytes.ptr()));
    }

    cpu::TextRingSizes sizes_;
    py::buffer_info memory_;  // keeps it mapped
    cpu::TextRing ring_;
    std::vector<bool>
        is_open_;  // texts that were taken and have no result, in the engine's process
};

inline void bind_text_ring(py::module_& m) {
    py::class_<PyTextRing>(m, "TextRing")
        .def(py::init<const py::buffer&, int64_t, int64_t, int64_t>())
        .def_static("num_bytes", &PyTextRing::num_bytes)
        .def("starts", &PyTextRing::starts)
        .def("submit", &PyTextRing::submit)
        .def("take_done", &PyTextRing::take_done)
        .def("has_entries", &PyTextRing::has_entries)
        .def("start_waiting", &PyTextRing::start_waiting)
        .def_static("take", &PyTextRing::take)
        .def_static("put", &PyTextRing::put)
        .def_static("fail", &PyTextRing::fail)
        .def_static("give", &PyTextRing::give);
}

}  // namespace bytetx
