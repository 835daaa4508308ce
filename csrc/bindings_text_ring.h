// The ring of texts between two processes as a Python class; arrays are of int32 and in one piece.
#pragma once

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
          ring_(bytes_of(memory_, sizes_), sizes_) {}

    static int64_t num_bytes(int64_t num_slots, int64_t max_tokens, int64_t width) {
        return checked(num_slots, max_tokens, width).num_bytes();
    }

    // Bytes before (SlotFacts, token ids, vectors).
    py::tuple starts() const {
        return py::make_tuple(sizes_.facts(), sizes_.token_ids(), sizes_.vectors());
    }

    bool submit(const py::buffer& entries) {
        const py::buffer_info info = entries.request();
        return ring_.submit(ints(info), info.size);
    }

    py::bytearray take_done() {
        const int64_t count = ring_.num_newly_done();
        py::bytearray slots = new_ints(count);
        ring_.take_done(data(slots), count);
        return slots;
    }

    bool has_entries() const { return ring_.has_entries(); }
    bool start_waiting() { return ring_.start_waiting(); }
    void stop_waiting() { ring_.stop_waiting(); }

    // (slots, kinds, groups, seqlens, prompt_tokens, is_truncated, token ids, cancelled slots) of
    // what was submitted since the last call.
    py::tuple take_entries() {
        std::vector<int32_t> slots(ring_.num_new_entries()), cancelled;
        ring_.take_entries(slots.data(), static_cast<int64_t>(slots.size()));
        size_t num_slots = 0;
        int64_t total_tokens = 0;
        std::vector<int32_t> lengths(slots.size());  // read once: the other process could change it
        for (const int32_t entry : slots) {
            if (entry < 0) {
                ring_.seqlen(~entry);  // which checks it
                cancelled.push_back(~entry);
                continue;
            }
            lengths[num_slots] = ring_.seqlen(entry);
            total_tokens += lengths[num_slots];
            slots[num_slots++] = entry;
        }
        const auto count = static_cast<int64_t>(num_slots);
        py::bytearray columns[6];
        for (py::bytearray& column : columns) column = new_ints(count);
        py::bytearray token_ids = new_ints(total_tokens);
        int32_t* ids = data(token_ids);
        for (int64_t i = 0; i < count; ++i) {
            const cpu::SlotFacts& facts = ring_.facts(slots[i]);
            data(columns[0])[i] = slots[i];
            data(columns[1])[i] = facts.kind;
            data(columns[2])[i] = facts.group;
            data(columns[3])[i] = lengths[i];
            data(columns[4])[i] = facts.prompt_tokens;
            data(columns[5])[i] = facts.is_truncated;
            ids = std::copy_n(ring_.token_ids(slots[i]), lengths[i], ids);
        }
        py::bytearray gone = new_ints(static_cast<int64_t>(cancelled.size()));
        std::copy(cancelled.begin(), cancelled.end(), data(gone));
        return py::make_tuple(columns[0], columns[1], columns[2], columns[3], columns[4],
                              columns[5], token_ids, gone);
    }

    void finish(const py::buffer& slots) {
        const py::buffer_info info = slots.request();
        ring_.finish(ints(info), info.size);
    }

  private:
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

    static const int32_t* ints(const py::buffer_info& info) {
        if (info.itemsize != 4 || info.ndim != 1 || (info.size && info.strides[0] != 4)) {
            throw py::value_error("slots must be int32 in one piece");
        }
        return static_cast<const int32_t*>(info.ptr);
    }

    static py::bytearray new_ints(int64_t count) {
        PyObject* bytes =
            PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(4 * count));
        if (bytes == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::bytearray>(bytes);
    }

    static int32_t* data(py::bytearray& bytes) {
        return reinterpret_cast<int32_t*>(PyByteArray_AS_STRING(bytes.ptr()));
    }

    cpu::TextRingSizes sizes_;
    py::buffer_info memory_;  // keeps it mapped
    cpu::TextRing ring_;
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
        .def("stop_waiting", &PyTextRing::stop_waiting)
        .def("take_entries", &PyTextRing::take_entries)
        .def("finish", &PyTextRing::finish);
}

}  // namespace bytetx
