// What gemm.cpp and mlp.cpp share of autograd and registration.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "gemm/product.h"

namespace cuda_ext {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Which arguments of apply need a gradient, asked in order: absent ones have no edge, so those behind them move up.
class EdgeCounter {
 public:
  explicit EdgeCounter(AutogradContext* ctx) : ctx_(ctx) {}
  bool needs_gradient(bool is_given) { return is_given && ctx_->needs_input_grad(next_++); }

 private:
  AutogradContext* ctx_;
  size_t next_ = 0;
};

// An activation's name between forward and backward.
inline c10::IValue to_ivalue(const ActivationName& name) {
  return name.has_value() ? c10::IValue(std::string(*name)) : c10::IValue();
}
inline ActivationName to_activation_name(const c10::IValue& saved) {
  return saved.isNone() ? std::nullopt : ActivationName(saved.toStringRef());
}

inline OptionalTensor optional(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

// The keys at which ops have no kernel yet: each refuses in words.
inline void register_refusals(torch::Library& m, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    m.impl(op, torch::dispatch(c10::DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunction<&no_cuda_kernel>()));
    for (const auto key : {c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::MkldnnCPU})
      m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&no_layout_kernel>()));
  }
}

}  // namespace cuda_ext
