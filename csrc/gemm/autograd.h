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

// What backward must know beside tensors. Only what is not the default is stored: most calls then store nothing, and a
// call on small tensors feels every entry.
inline void save_activation(AutogradContext* ctx, const ActivationName& name) {
  if (name.has_value()) ctx->saved_data["activation"] = std::string(*name);
}
inline ActivationName saved_activation(const AutogradContext* ctx) {
  const auto found = ctx->saved_data.find("activation");
  return found == ctx->saved_data.end() ? std::nullopt : ActivationName(found->second.toStringRef());
}
inline void save_flag(AutogradContext* ctx, const char* name, bool value) {
  if (value) ctx->saved_data[name] = true;
}
inline bool saved_flag(const AutogradContext* ctx, const char* name) { return ctx->saved_data.count(name) != 0; }
inline void save_scale(AutogradContext* ctx, const char* name, double value) {
  if (value != 1.0) ctx->saved_data[name] = value;
}
inline double saved_scale(const AutogradContext* ctx, const char* name) {
  const auto found = ctx->saved_data.find(name);
  return found == ctx->saved_data.end() ? 1.0 : found->second.toDouble();
}

inline OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// The keys at which ops have no kernel yet: each refuses in words.
inline void register_refusals(torch::Library& m, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    m.impl(op, torch::dispatch(c10::DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunction<&no_cuda_kernel>()));
    for (const auto key : {c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::MkldnnCPU})
      m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&no_layout_kernel>()));
  }
}

}  // namespace cuda_ext
