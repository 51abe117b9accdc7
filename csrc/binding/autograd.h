// What the bindings share of autograd: scalars and optional tensors saved for backward at no cost when not given.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "binding/op.h"

namespace cuda_ext {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What backward must know beside tensors. Only what is not the default is stored: most calls then store nothing, and a
// call on small tensors feels every entry.
template <class T>
void save_option(AutogradContext* ctx, const char* name, const T& value, const T& otherwise = T()) {
  if (value != otherwise) ctx->saved_data[name] = value;
}
template <class T>
T saved_option(const AutogradContext* ctx, const char* name, const T& otherwise = T()) {
  const auto found = ctx->saved_data.find(name);
  return found == ctx->saved_data.end() ? otherwise : found->second.to<T>();
}

inline OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Which arguments of apply need a gradient, asked in order: absent ones have no edge, so those behind them move up.
class EdgeCounter {
 public:
  explicit EdgeCounter(AutogradContext* ctx) : ctx_(ctx) {}
  bool needs_gradient(bool is_given) { return is_given && ctx_->needs_input_grad(next_++); }

 private:
  AutogradContext* ctx_;
  size_t next_ = 0;
};

}  // namespace cuda_ext
