// One signature an operation: its Params struct. bind() reads the arguments of a Python call field
// by field, in the order of the struct, and behind them the four fields of Launch.
//
// A pointer is an address (int), an enum its number, a struct inside a struct a tuple of its
// fields, a std::array a sequence of at most as many numbers. Tensors have been checked before, by
// bytetx/ops/.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "ops.h"

namespace py = pybind11;

namespace bytetx {

using Address = std::uintptr_t;

template <typename T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

struct AnyField {
    template <typename T>
    operator T() const;
};

template <typename Params, typename... Fields>
consteval size_t num_fields() {
    if constexpr (requires { Params{Fields{}..., AnyField{}}; }) {
        return num_fields<Params, Fields..., AnyField>();
    } else {
        return sizeof...(Fields);
    }
}

inline int64_t to_integer(py::handle value) {
    const int64_t number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
    return number;
}

template <typename Params>
Params to_params(const py::tuple& values, size_t first);

template <typename T>
struct FromPython {  // a struct inside a struct
    static T convert(py::handle value) {
        if (!PyTuple_Check(value.ptr()) ||
            PyTuple_GET_SIZE(value.ptr()) != py::ssize_t{num_fields<T>()}) {
            throw py::type_error("needs a tuple of " + std::to_string(num_fields<T>()) +
                                 " fields, got " + std::string(py::repr(value)));
        }
        return to_params<T>(py::reinterpret_borrow<py::tuple>(value), 0);
    }
};

template <typename T>
struct FromPython<T*> {
    static T* convert(py::handle value) {
        const auto address = PyLong_AsUnsignedLongLong(value.ptr());
        if (PyErr_Occurred()) throw py::error_already_set();
        return reinterpret_cast<T*>(static_cast<Address>(address));
    }
};

template <std::integral T>
struct FromPython<T> {
    static T convert(py::handle value) {
        const int64_t number = to_integer(value);
        if (!std::in_range<T>(number)) {
            throw py::value_error(std::to_string(number) + " does not fit its field");
        }
        return static_cast<T>(number);
    }
};

template <>
struct FromPython<bool> {
    static bool convert(py::handle value) {
        const int truth = PyObject_IsTrue(value.ptr());
        if (truth < 0) throw py::error_already_set();
        return truth != 0;
    }
};

template <>
struct FromPython<float> {
    static float convert(py::handle value) {
        const double number = PyFloat_AsDouble(value.ptr());
        if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
        return static_cast<float>(number);
    }
};

template <typename T>
    requires std::is_enum_v<T>
struct FromPython<T> {
    static T convert(py::handle value) { return static_cast<T>(to_integer(value)); }
};

template <>
struct FromPython<DType> {
    static DType convert(py::handle value) {
        const int64_t code = to_integer(value);
        if (code < 0 || code > static_cast<int64_t>(DType::bf16)) {
            throw std::invalid_argument("dtype code must be 0 (f32), 1 (f16) or 2 (bf16), got " +
                                        std::to_string(code));
        }
        return static_cast<DType>(code);
    }
};

template <typename T, size_t size>
struct FromPython<std::array<T, size>> {
    static std::array<T, size> convert(py::handle value) {
        const auto numbers = py::reinterpret_borrow<py::sequence>(value);
        if (numbers.size() > size) {
            throw py::value_error("at most " + std::to_string(size) + " numbers, got " +
                                  std::to_string(numbers.size()));
        }
        std::array<T, size> found{};
        for (size_t i = 0; i < numbers.size(); ++i) {
            found[i] = FromPython<T>::convert(py::object(numbers[i]));
        }
        return found;
    }
};

class Argument {
  public:
    explicit Argument(PyObject* value) : value_(value) {}

    template <typename T>
    operator T() const {
        return FromPython<T>::convert(value_);
    }

  private:
    PyObject* value_;
};

// The fields of a Params that begin at values[first]; there are as many as it has.
template <typename Params>
Params to_params(const py::tuple& values, size_t first) {
    return [&]<size_t... i>(std::index_sequence<i...>) {
        return Params{Argument(PyTuple_GET_ITEM(values.ptr(), first + i))...};
    }(std::make_index_sequence<num_fields<Params>()>());
}

// While the op runs, other Python threads run too.
template <typename Params>
void bind(py::module_& m, const char* name, void (*op)(const Params&, const Launch&)) {
    m.def(name, [name, op](const py::args& values) {
        constexpr size_t size = num_fields<Params>() + num_fields<Launch>();
        if (values.size() != size) {
            throw py::type_error(std::string(name) + " takes " + std::to_string(size) +
                                 " arguments, got " + std::to_string(values.size()));
        }
        const auto params = to_params<Params>(values, 0);
        const auto launch = to_params<Launch>(values, num_fields<Params>());
        const py::gil_scoped_release release;
        op(params, launch);
    });
}

}  // namespace bytetx
