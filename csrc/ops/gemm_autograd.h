// What gemm.cpp and mlp.cpp share of autograd and registration.
#pragma once

#include "ops/autograd.h"
#include "ops/gradient_slots.h"
#include "ops/product.h"

namespace cuda_ext {

// As a number: a saved string is an allocation more.
inline void save_activation(AutogradContext* ctx, const ActivationName& name) {
  save_option(ctx, "activation", int64_t(parse_activation("backward", name)));
}
inline ActivationName saved_activation(const AutogradContext* ctx) {
  return name_of(Activation(saved_option<int64_t>(ctx, "activation")));
}

// The fused backward of all these ops is two calls at least, so that what the first read is gone when the second takes
// memory. This is the first: the gradient at the pre-activation, and that of the bias where `bias_type` is given.
std::tuple<Tensor, Tensor> call_activation_backward(const Tensor& grad, const Tensor& preact,
                                                    const ActivationName& activation, bool gated,
                                                    OptionalType bias_type);

// The gradients of a projection's input and weight from that at its pre-activation. One that a slot takes is undefined.
struct ProjectionGradients {
  Tensor input, weight, bias;
};
// The weight is input 1 of the node that runs.
ProjectionGradients call_linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, std::array<bool, 3> wanted);

// The layouts that no kernel reads: each op refuses them in words.
inline void register_refusals(torch::Library& m, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    for (const auto key : {c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::MkldnnCPU})
      m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&no_layout_kernel>()));
  }
}

}  // namespace cuda_ext
