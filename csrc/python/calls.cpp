// The Python module cuda_ext._calls: the ops of small calls, without the parsing of arguments by schema, which takes
// torch.ops longer than a small product takes. An extension of one Python version, apart from the library, which needs
// no Python; without it the same calls go through torch.ops.
//
// A function takes all arguments of its op by position. It returns NotImplemented, and has done nothing, if it cannot
// be sure to do what torch.ops would: for subclasses of Tensor, symbolic numbers, arguments of a wrong type, while a
// TorchFunctionMode is active or torch.jit traces. Everything else that can be in the way of a call, such as autograd,
// autocast, functorch and dispatch modes, is the dispatcher's work.
#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "ops/op.h"

namespace cuda_ext {
namespace {

// Whether a Python object is exactly of the type, and then its value.
bool convert(PyObject* object, Tensor& value) {
  if (!THPVariable_CheckExact(object)) return false;
  value = THPVariable_Unpack(object);
  return true;
}
bool convert(PyObject* object, bool& value) {
  value = object == Py_True;
  return PyBool_Check(object);
}
bool convert(PyObject* object, double& value) {
  if (!PyFloat_CheckExact(object)) return false;
  value = PyFloat_AsDouble(object);
  return true;
}
bool convert(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}
bool convert(PyObject* object, std::string_view& value) {
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
  if (data == nullptr) return PyErr_Clear(), false;
  value = {data, size_t(size)};
  return true;
}
bool convert(PyObject* object, at::ScalarType& value) {
  if (!THPDtype_Check(object)) return false;
  value = reinterpret_cast<THPDtype*>(object)->scalar_type;
  return true;
}
template <class T>
bool convert(PyObject* object, std::optional<T>& value) {
  return object == Py_None || convert(object, value.emplace());
}

PyObject* wrap(Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }
PyObject* wrap(std::tuple<Tensor, Tensor> tensors) {
  PyObject* const pair = PyTuple_New(2);
  PyTuple_SET_ITEM(pair, 0, wrap(std::move(std::get<0>(tensors))));
  PyTuple_SET_ITEM(pair, 1, wrap(std::move(std::get<1>(tensors))));
  return pair;
}

// Other threads run while an op does.
struct WithoutGil {
  PyThreadState* const state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

template <class... T, size_t... i>
bool convert_all(PyObject* const* given, std::tuple<T...>& values, std::index_sequence<i...>) {
  return (convert(given[i], std::get<i>(values)) && ...);
}

template <class Result, class... Args>
PyObject* call(const c10::TypedOperatorHandle<Result(Args...)>& op, PyObject* const* given, Py_ssize_t count) {
  std::tuple<std::decay_t<Args>...> values;
  if (count != sizeof...(Args) || at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing() ||
      !convert_all(given, values, std::index_sequence_for<Args...>()))
    Py_RETURN_NOTIMPLEMENTED;
  return wrap([&] {
    const WithoutGil without_gil;
    return std::apply([&](const auto&... args) { return op.call(args...); }, values);
  }());
}

#define OP(name, ...)                                                   \
  PyObject* name(PyObject*, PyObject* const* given, Py_ssize_t count) { \
    HANDLE_TH_ERRORS                                                    \
    static const auto op = find_op<__VA_ARGS__>(CUDA_EXT_OP(#name));    \
    return call(op, given, count);                                      \
    END_HANDLE_TH_ERRORS                                                \
  }

using Given = const Tensor&;
using Optional = const OptionalTensor&;
using Name = std::optional<std::string_view>;
using Type = std::optional<at::ScalarType>;
using Int = std::optional<int64_t>;

OP(gemm, Tensor(Given, Given, Optional, Optional, Name, double, double, Type))
OP(linear, Tensor(Given, Given, Optional, Optional, Name))
OP(gated_linear, Tensor(Given, Given, Optional, Name))
OP(mlp, Tensor(Given, Given, Given, Optional, Optional, Optional, Name))
OP(gated_mlp, Tensor(Given, Given, Given, Optional, Optional, Optional, Name))
OP(flash_attention,
   std::tuple<Tensor, Tensor>(Given, Given, Given, Optional, Optional, Optional, Optional, Optional, Optional, Optional,
                              bool, std::optional<double>, Int, Int, double, double, std::optional<bool>, bool))

#define METHOD(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(name)), METH_FASTCALL, nullptr}
PyMethodDef methods[] = {METHOD(gemm),      METHOD(linear),          METHOD(gated_linear),          METHOD(mlp),
                         METHOD(gated_mlp), METHOD(flash_attention), {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_calls", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace cuda_ext

PyMODINIT_FUNC PyInit__calls() { return PyModule_Create(&cuda_ext::module); }
