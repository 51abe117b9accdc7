// What the autograd functions of gemm.cpp and mlp.cpp share.
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

}  // namespace cuda_ext
