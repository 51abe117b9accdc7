// Autograd and registration shared by gemm.cpp, linear.cpp and mlp.cpp.
#pragma once

#include "ops/autograd.h"
#include "ops/gradient_slots.h"
#include "ops/product.h"

namespace cuda_ext {

// Saved as a number, because a string would need an allocation.
inline void save_activation(AutogradContext* ctx, const ActivationName& name) {
  save_option(ctx, "activation", int64_t(parse_activation("backward", name)));
}
inline ActivationName saved_activation(const AutogradContext* ctx) {
  return name_of(Activation(saved_option<int64_t>(ctx, "activation")));
}

// The fused backward of these ops makes at least two calls, so that the inputs of the first are freed before the second
// allocates. This is the first: the gradient at the pre-activation, and that of the bias if `bias_type` is given.
std::tuple<Tensor, Tensor> call_activation_backward(const Tensor& grad, const Tensor& preact,
                                                    const ActivationName& activation, bool gated,
                                                    OptionalType bias_type);

// The gradients of a linear layer, from the gradient at its pre-activation. A gradient that went to a slot is
// undefined.
struct ProjectionGradients {
  Tensor input, weight, bias;
};
// The weight must be input 1 of the current autograd node.
ProjectionGradients call_linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, std::array<bool, 3> wanted);

// Registers the error for unsupported layouts.
inline void register_layout_errors(torch::Library& m, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    for (const auto key : {c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::MkldnnCPU})
      m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&no_layout_kernel>()));
  }
}

}  // namespace cuda_ext
