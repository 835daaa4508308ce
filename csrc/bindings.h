// One signature per operation: the fields of its Params struct and `launch`, all by name. A field
// that is missing, unknown or given twice is a TypeError, whatever the order at the call.
//
// A pointer is an address (int), a tensor (its data_ptr()) or None for null; an enum its number; a
// struct inside a struct a NamedTuple of the same fields; a std::array a sequence of at most as
// many values. Tensors have been checked before, by bytetx/ops/.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "contract_fields.h"  // made by the build: Fields<Params>, see contract.py
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

class Argument {
  public:
    Argument() = default;
    explicit Argument(PyObject* value) : value_(value) {}

    template <typename T>
    operator T() const;

    PyObject* object() const { return value_; }

  private:
    PyObject* value_ = nullptr;
};

// Whether a NamedTuple has the fields of T in their order.
template <typename T>
bool has_fields_of(PyTypeObject* type) {
    const auto fields = py::getattr(reinterpret_cast<PyObject*>(type), "_fields", py::tuple());
    const auto& names = Fields<T>::names;
    if (py::len(fields) != names.size()) return false;
    for (size_t i = 0; i < names.size(); ++i) {
        if (py::cast<std::string>(fields[py::int_(i)]) != names[i]) return false;
    }
    return true;
}

template <typename T>
struct FromPython {  // a struct inside a struct
    static T convert(py::handle value) {
        static PyTypeObject* known = nullptr;  // the GIL guards it
        PyTypeObject* type = Py_TYPE(value.ptr());
        if (type != known) {
            if (!PyTuple_Check(value.ptr()) || !has_fields_of<T>(type)) {
                std::string names;
                for (const char* name : Fields<T>::names) names += std::string(" ") + name;
                throw py::type_error("needs a NamedTuple of the fields" + names + ", got " +
                                     std::string(py::repr(value)));
            }
            Py_INCREF(type);
            Py_XSETREF(known, type);
        }
        std::array<Argument, Fields<T>::names.size()> values;
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = Argument(PyTuple_GET_ITEM(value.ptr(), i));
        }
        static_assert(num_fields<T>() == Fields<T>::names.size());
        return Fields<T>::make(values);
    }
};

template <typename T>
struct FromPython<T*> {
    static T* convert(py::handle value) {
        PyObject* self = value.ptr();
        if (self == Py_None) return nullptr;
        if (PyLong_Check(self)) return from_int(self);
        static PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
        const auto found = py::reinterpret_steal<py::object>(
            PyObject_VectorcallMethod(data_ptr, &self, 1, nullptr));
        if (!found) throw py::error_already_set();
        return from_int(found.ptr());
    }

    static T* from_int(PyObject* value) {
        const unsigned long long address = PyLong_AsUnsignedLongLong(value);
        if (address == ~0ull && PyErr_Occurred()) throw py::error_already_set();
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

template <typename T>
Argument::operator T() const {
    return FromPython<T>::convert(value_);
}

// Which parameter each name of a call is. All calls from one place in Python share one tuple of
// names, so that a comparison of addresses answers most of them.
template <size_t size>
class ArgumentNames {
  public:
    ArgumentNames() = default;
    ArgumentNames(const char* op, const std::array<const char*, size>& names) : op_(op) {
        for (size_t i = 0; i < size; ++i) expected_[i] = PyUnicode_InternFromString(names[i]);
    }

    // The arguments of a call by vectorcall, in the order of the parameters.
    std::array<Argument, size> in_order(PyObject* const* values, Py_ssize_t num_unnamed,
                                        PyObject* names) {
        if (names != known_ || num_unnamed != 0 || names == nullptr) learn(num_unnamed, names);
        std::array<Argument, size> found;
        for (size_t i = 0; i < size; ++i) found[places_[i]] = Argument(values[i]);
        return found;
    }

    std::string signature() const {
        std::string text = op_ + "($module, *";
        for (PyObject* name : expected_) text += ", " + py::cast<std::string>(py::handle(name));
        return text + ")\n--\n\n";
    }

  private:
    void learn(Py_ssize_t num_unnamed, PyObject* names) {
        const size_t num_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
        if (num_unnamed != 0) {
            throw py::type_error(op_ + " takes its arguments by name, got " +
                                 std::to_string(num_unnamed) + " without one");
        }
        std::array<bool, size> is_given{};
        std::array<size_t, size> places{};
        for (size_t i = 0; i < num_names; ++i) {
            const size_t place = find(PyTuple_GET_ITEM(names, i));
            if (place == size) {
                throw py::type_error(op_ + " has no argument " +
                                     std::string(py::repr(PyTuple_GET_ITEM(names, i))));
            }
            places[i] = place;  // Python gives no name twice
            is_given[place] = true;
        }
        for (size_t i = 0; i < size; ++i) {
            if (!is_given[i]) {
                throw py::type_error(op_ + " needs the argument " +
                                     py::cast<std::string>(py::handle(expected_[i])));
            }
        }
        places_ = places;
        Py_INCREF(names);
        Py_XSETREF(known_, names);
    }

    size_t find(PyObject* name) const {
        const auto same = std::find(expected_.begin(), expected_.end(), name);
        if (same != expected_.end()) return same - expected_.begin();
        const auto equal = std::find_if(expected_.begin(), expected_.end(), [&](PyObject* other) {
            return PyUnicode_Compare(name, other) == 0;
        });
        return equal - expected_.begin();
    }

    std::string op_;
    std::array<PyObject*, size> expected_;
    std::array<size_t, size> places_{};  // fields of the names in known_
    PyObject* known_ = nullptr;          // owned, so that its address stays its own
};

// Translates a C++ exception into a Python one, as pybind11 does for the functions it binds.
inline void set_python_error() {
    try {
        throw;
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const py::builtin_exception& error) {
        error.set_error();
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

// How many parameters a function has in Python, and its call with arguments in their order.
template <typename Function>
struct Invoke;

template <typename Params>
struct Invoke<void (*)(const Params&, const Launch&)> {  // an operation: the fields, and `launch`
    static constexpr size_t kSize = Fields<Params>::names.size() + 1;
    static_assert(num_fields<Params>() == kSize - 1);

    static constexpr std::array<const char*, kSize> names() {
        std::array<const char*, kSize> found{};
        std::copy_n(Fields<Params>::names.begin(), kSize - 1, found.begin());
        found[kSize - 1] = "launch";
        return found;
    }

    static PyObject* call(void (*op)(const Params&, const Launch&),
                          const std::array<Argument, kSize>& given) {
        const Params params = Fields<Params>::make(given);
        const Launch launch = given[kSize - 1];
        {
            // While the op runs, other Python threads run too.
            const py::gil_scoped_release release;
            op(params, launch);
        }
        Py_RETURN_NONE;
    }
};

template <std::integral Size, typename... Values>
struct Invoke<Size (*)(Values...)> {  // a size
    static constexpr size_t kSize = sizeof...(Values);

    static PyObject* call(Size (*size)(Values...), const std::array<Argument, kSize>& given) {
        return [&]<size_t... i>(std::index_sequence<i...>) {
            return PyLong_FromLongLong(size(FromPython<Values>::convert(given[i].object())...));
        }(std::make_index_sequence<kSize>());
    }
};

// One function of the core as one of Python, whose arguments have names.
template <auto function>
struct Binding {
    using Invoked = Invoke<decltype(function)>;

    static inline std::string name;
    static inline std::string signature;  // inspect.signature() reads it
    static inline ArgumentNames<Invoked::kSize> names;
    static inline PyMethodDef method;

    static PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t num_unnamed,
                          PyObject* given) {
        try {
            return Invoked::call(function, names.in_order(values, num_unnamed, given));
        } catch (...) {
            set_python_error();
            return nullptr;
        }
    }
};

template <auto function>
void bind(py::module_& m, const char* name,
          const std::array<const char*, Invoke<decltype(function)>::kSize>& names =
              Invoke<decltype(function)>::names()) {
    using Bound = Binding<function>;
    Bound::name = name;
    Bound::names = {name, names};
    Bound::signature = Bound::names.signature();
    Bound::method = {Bound::name.c_str(),
                     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Bound::call)),
                     METH_FASTCALL | METH_KEYWORDS, Bound::signature.c_str()};
    const auto owner = py::str(m.attr("__name__"));
    m.attr(name) =
        py::reinterpret_steal<py::object>(PyCFunction_NewEx(&Bound::method, m.ptr(), owner.ptr()));
}

}  // namespace bytetx
