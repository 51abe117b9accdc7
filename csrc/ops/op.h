// Shared by all ops: names, checks with the documented error format, dtype mapping, access to other ops through the
// dispatcher, autocast, and the error for unsupported layouts.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <string>

#include "base/dtype.h"

#define CUDA_EXT_STRINGIZE_(x) #x
#define CUDA_EXT_STRINGIZE(x) CUDA_EXT_STRINGIZE_(x)
// "cuda_ext::gemm" from "gemm"; the build defines the namespace.
#define CUDA_EXT_OP(name) CUDA_EXT_STRINGIZE(CUDA_EXT_NAMESPACE) "::" name

// Errors read `cuda_ext::gemm: expected b of shape (..., 64, N) to match a (8, 64), got (32, 16)`.
#define CUDA_EXT_CHECK(condition, op, ...) TORCH_CHECK(condition, CUDA_EXT_OP(""), op, ": ", __VA_ARGS__)

namespace cuda_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// "(2, 3)", as Python prints a shape.
inline std::string shape_string(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}
inline std::string shape_string(const Tensor& tensor) { return shape_string(tensor.sizes()); }

inline const Tensor& value_or_empty(const OptionalTensor& tensor) {
  static const Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}
inline bool is_given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

inline Dtype to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return Dtype::kFloat16;
    case at::kBFloat16: return Dtype::kBFloat16;
    case at::kDouble: return Dtype::kFloat64;
    case at::kFloat8_e4m3fn: return Dtype::kFloat8E4M3;
    case at::kFloat8_e5m2: return Dtype::kFloat8E5M2;
    default: return Dtype::kFloat32;
  }
}

// "float16", as Python names a dtype.
inline std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

// at::empty; on the CPU without the dispatcher, which saves a third of a microsecond.
inline Tensor empty_on(at::Device device, at::IntArrayRef sizes, at::ScalarType type) {
  return device.is_cpu() ? Tensor(at::detail::empty_cpu(sizes, type, /*pin_memory=*/false, std::nullopt))
                         : at::empty(sizes, at::TensorOptions(device).dtype(type));
}

// float32, or float64 for float64: the type in which results are accumulated and statistics returned.
inline at::ScalarType accumulation_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

inline bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}
// None passed for a tensor arrives as an undefined tensor.
inline void check_given(const char* op, const char* argument, const Tensor& tensor) {
  CUDA_EXT_CHECK(tensor.defined(), op, "expected ", argument, " to be a tensor, got None");
}
inline void check_floating(const char* op, const char* argument, const Tensor& tensor) {
  check_given(op, argument, tensor);
  CUDA_EXT_CHECK(is_floating(tensor.scalar_type()), op, "expected ", argument,
                 " of dtype float32, float16, bfloat16 or float64, got ", dtype_name(tensor.scalar_type()),
                 "; convert it with .to()");
}

inline void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                             const Tensor& other) {
  check_given(op, argument, tensor);
  CUDA_EXT_CHECK(tensor.scalar_type() == other.scalar_type(), op, "expected ", argument, " of dtype ",
                 dtype_name(other.scalar_type()), " to match ", other_argument, ", got ",
                 dtype_name(tensor.scalar_type()), "; convert one of them with .to()");
}

inline void check_same_device(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                              const Tensor& other) {
  CUDA_EXT_CHECK(tensor.device() == other.device(), op, "expected ", argument, " on device ", other.device(),
                 " to match ", other_argument, ", got ", tensor.device(), "; move one of them with .to()");
}

// The kernel of all ops for unsupported layouts (sparse and mkldnn): raises an error. It is boxed, so that it fits all
// schemas.
inline void no_layout_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::string name = op.schema().name();
  const size_t suffix = name.rfind("_forward");  // report the name of the public op
  if (suffix != std::string::npos) name.resize(suffix);
  for (const c10::IValue& argument : *stack)
    TORCH_CHECK(!argument.isTensor() || argument.toTensor().layout() == at::kStrided, name,
                ": expected dense tensors of layout torch.strided, got ", argument.toTensor().layout(),
                "; convert it with .to_dense()");
}

// A typed handle to one of our ops, looked up once:
// `static const auto op = find_op<decltype(linear)>(CUDA_EXT_OP("linear"));`
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* qualified_name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(qualified_name, overload).typed<Signature>();
}

template <class... Tensors>
bool any_requires_grad(const Tensors&... tensors) {
  const auto requires_grad = [](const auto& t) {
    if constexpr (std::is_same_v<std::decay_t<decltype(t)>, OptionalTensor>) {
      return is_given(t) && t->requires_grad();
    } else {
      return t.requires_grad();
    }
  };
  return c10::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// The forward-mode tangent of a tensor; undefined if it has none.
inline Tensor tangent_of(const Tensor& tensor) { return tensor.defined() ? tensor._fw_grad(/*level=*/0) : Tensor(); }
inline Tensor tangent_of(const OptionalTensor& tensor) { return tangent_of(value_or_empty(tensor)); }

// The tensor without its tangent.
inline Tensor primal(const Tensor& tensor) {
  return tangent_of(tensor).defined() ? tensor._fw_primal(/*level=*/0) : tensor;
}

template <class... Tensors>
bool any_has_tangent(const Tensors&... tensors) {
  return (tangent_of(tensors).defined() || ...);
}

// Casts the floating tensor arguments of an op to autocast's dtype, and disables autocast while it exists.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device)
      : device_(device),
        dtype_(at::autocast::get_autocast_dtype(device)),
        guard_(c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device))) {}
  Tensor operator()(const Tensor& tensor) const { return at::autocast::cached_cast(dtype_, tensor, device_); }
  OptionalTensor operator()(const OptionalTensor& tensor) const {
    return is_given(tensor) ? OptionalTensor((*this)(*tensor)) : tensor;
  }

 private:
  c10::DeviceType device_;
  at::ScalarType dtype_;
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace cuda_ext
